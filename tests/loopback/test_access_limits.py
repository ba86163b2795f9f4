"""Limits of one client: idle connections, calls, metadata; and their effect on other clients."""

import contextlib
import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest

from rlmesh_ray import (
    EnvServer,
    ListenOptions,
    ModelServer,
    RemoteEnv,
    RemoteModel,
    RemoteVectorEnv,
)
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.health import check_health
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import JSON, RLlinkClient
from rlmesh_ray.dialects.rllink.server.connection import RLlinkLimits, RLlinkServer
from rlmesh_ray.dialects.rllink.wire import framed
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    ConfigurationError,
    EndpointError,
    EndpointLostError,
    RemoteEnvError,
)
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.endpoint import calls, gate
from rlmesh_ray.server.env import env_server
from rlmesh_ray.server.pool.gateway import GatewayServer
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.loopback.child_processes import worker_pids
from tests.loopback.dm_env_rpc_stream import DmStream
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address, plain_channel
from tests.loopback.raw_join import ENV_JOIN, MODEL_JOIN, RawJoin
from tests.loopback.served_calls import ended_with

STATE = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
OPENPI_CONTRACT = EnvContract(
    "openpi",
    from_gymnasium(gymnasium.spaces.Dict({"state": STATE})),
    from_gymnasium(STATE),
    1,
    AutoresetMode.NEXT_STEP,
)
TRANSPORTS = ("grpc", "shared_memory")
"""The sign of life of a direct connection is the worker's progress, whichever its medium."""


def zeros(observations: Any) -> Any:
    return np.zeros(len(observations), np.int64)


# --- idle connections ------------------------------------------------------------------


def test_an_idle_session_ends_and_its_client_gets_the_reason() -> None:
    with (
        EnvServer("CartPole-v1", address=ListenOptions(idle_timeout_s=1.5)) as server,
        DmStream(server.address) as stream,
    ):
        envs = [
            EnvClient(ConnectOptions(server.address), transport=transport)
            for transport in TRANSPORTS
        ]
        for env in envs:
            env.reset()
            env.step([np.zeros(1, np.int64)])
        stream.join(stream.create())

        assert eventually(lambda: server.num_sessions == 0)
        for env in envs:
            with pytest.raises(EndpointLostError, match=r"no request came for 1\.5 s"):
                env.reset()
            env.close()
        with pytest.raises(grpc.RpcError) as caught:
            stream.receive()

    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert "no request came" in caught.value.details()


class Dozing(gymnasium.Env[Any, Any]):
    """Takes long for a step, and for a call."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **_more: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action:
            self.doze()
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def doze(self) -> None:
        time.sleep(2.5)


def step(env: EnvClient, action: int = 0) -> None:
    env.step([np.full(1, action, np.int64)])


def go_on(use: Callable[[EnvClient], Any]) -> Callable[[EnvClient], None]:
    """Return what uses an environment, with short pauses, for longer than it may be idle."""

    def use_on(env: EnvClient) -> None:
        end_s = time.monotonic() + 3.0
        while time.monotonic() < end_s:
            use(env)
            time.sleep(0.02)

    return use_on


def wait_for_a_step(env: EnvClient) -> None:
    step(env)
    step(env)  # the first ones are not sent through shared memory
    step(env, 1)
    step(env)


def test_a_session_that_is_used_or_waits_for_its_environment_is_not_silent() -> None:
    uses: list[tuple[str, Callable[[EnvClient], Any]]] = [
        ("shared_memory", go_on(step)),
        *((transport, wait_for_a_step) for transport in TRANSPORTS),
        ("grpc", go_on(lambda env: env.call("spec"))),
        ("grpc", lambda env: env.call("doze")),
    ]
    with (
        EnvServer(
            Dozing, address=ListenOptions(idle_timeout_s=2.0), allow_calls=("doze", "spec")
        ) as server,
        contextlib.ExitStack() as sessions,
        ThreadPoolExecutor(len(uses)) as threads,
    ):
        envs = []
        for transport, _ in uses:
            env = EnvClient(ConnectOptions(server.address), transport=transport)
            envs.append(sessions.enter_context(contextlib.closing(env)))

        def run(env: EnvClient, use: Callable[[EnvClient], Any]) -> None:
            env.reset()
            use(env)
            env.reset()

        done = [threads.submit(run, env, use) for env, (_, use) in zip(envs, uses, strict=True)]
        for future in done:
            future.result()


def test_a_silent_model_session_ends_but_not_one_that_waits_for_its_answer() -> None:
    env = gymnasium.make_vec("CartPole-v1", num_envs=1)
    may_act = threading.Event()

    def slow(observations: Any) -> Any:
        may_act.wait(30.0)
        return zeros(observations)

    with ModelServer(slow, address=ListenOptions(idle_timeout_s=1.0)) as server:
        observations, _ = env.reset()
        model = RemoteModel(server.address)
        model.configure_route(env)
        timer = threading.Timer(1.5, may_act.set)
        timer.start()
        assert model.predict(observations) == [0]
        timer.join()

        assert eventually(lambda: server.statistics().sessions.open == 0)
        with pytest.raises(EndpointLostError, match="no request came"):
            model.predict(observations)
        model.close()


@pytest.mark.parametrize("wrong", [0, -1.0, float("inf"), float("nan")])
def test_an_idle_timeout_is_a_number_of_seconds(wrong: float) -> None:
    with pytest.raises(ConfigurationError, match="idle_timeout_s"):
        ListenOptions(idle_timeout_s=wrong)


@pytest.fixture(scope="module")
def pole() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1") as server:
        yield server


@pytest.mark.parametrize("path", [ENV_JOIN, MODEL_JOIN, "/dm_env_rpc.v1.Environment/Process"])
def test_a_stream_without_a_message_is_aborted(
    path: str, pole: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FIRST_MESSAGE_TIMEOUT_S", 0.3)
    serve: Any = ModelServer(zeros) if path == MODEL_JOIN else contextlib.nullcontext(pole)
    with serve as server, plain_channel(server.address) as channel, RawJoin(channel, path) as mute:
        with pytest.raises(grpc.RpcError) as caught:
            mute.receive()

        assert caught.value.code() is grpc.StatusCode.ABORTED
        assert "no message came" in caught.value.details()
        assert eventually(lambda: getattr(server, "num_sessions", 0) == 0)


def test_who_has_shaken_hands_may_take_time(
    pole: EnvServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "FIRST_MESSAGE_TIMEOUT_S", 0.1)
    with (
        ModelServer(zeros) as model_server,
        plain_channel(pole.address) as channel,
        RawJoin(channel, ENV_JOIN) as mute,
    ):
        env, model = EnvClient(ConnectOptions(pole.address)), RemoteModel(model_server.address)
        with pytest.raises(grpc.RpcError):  # who has not has lost the place meanwhile
            mute.receive()

        env.reset()
        env.close()
        model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=1))
        model.close()


# --- hostile clients -------------------------------------------------------------------


@pytest.fixture(scope="module")
def poles() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2, max_sessions=2) as server:
        yield server


@pytest.fixture
def undisturbed(poles: EnvServer) -> Iterator[EnvServer]:
    """Yield an endpoint with another client at work, which notices nothing until the end."""
    failures: list[Exception] = []
    is_over = threading.Event()
    num_steps = [0]

    def work() -> None:
        try:
            with contextlib.closing(RemoteVectorEnv(poles.address, transport="grpc")) as env:
                env.reset()
                while not is_over.is_set():
                    env.step(np.zeros(2, np.int64))
                    num_steps[0] += 1
        except Exception as error:  # noqa: BLE001  # reported below
            failures.append(error)

    assert eventually(lambda: poles.num_sessions == 0)
    worker = threading.Thread(target=work)
    worker.start()
    assert eventually(lambda: num_steps[0] > 0 or bool(failures))
    try:
        yield poles
        before = num_steps[0]
        assert eventually(lambda: num_steps[0] > before + 10 or bool(failures))
    finally:
        is_over.set()
        worker.join(30.0)
    assert failures == []


def where(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def test_many_half_open_connections_disturb_no_other_client(undisturbed: EnvServer) -> None:
    with contextlib.ExitStack() as lines:
        for number in range(200):
            line = lines.enter_context(socket.create_connection(where(undisturbed.address), 10.0))
            if number % 2:
                line.sendall(b"PRI * HTTP/2.0\r\n")  # and never the rest

        assert check_health(ConnectOptions(undisturbed.address)).is_serving


def test_streams_that_are_opened_and_reset_disturb_no_other_client(undisturbed: EnvServer) -> None:
    with plain_channel(undisturbed.address) as channel:
        join = channel.stream_stream(ENV_JOIN)
        for _ in range(100):
            join(iter(())).cancel()

        assert eventually(lambda: undisturbed.num_sessions == 1)
        with contextlib.closing(RemoteVectorEnv(undisturbed.address)) as env:
            env.reset()


def test_a_connection_without_a_call_ends_within_the_limit() -> None:
    idle_ms = dict(gate.connection_options())["grpc.max_connection_idle_ms"]

    # gRPC closes it between once and twice this time.
    assert 2 * idle_ms == gate.CONNECTION_IDLE_S * 1000


def test_giant_metadata_are_refused_unread(undisturbed: EnvServer) -> None:
    for size in (20_000, 1_000_000):
        with plain_channel(undisturbed.address) as channel:
            code, _, answers = ended_with(
                channel, "/grpc.health.v1.Health/Check", (("authorization", "a" * size),)
            )

        assert code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert answers == []


def test_garbage_disturbs_no_other_client(undisturbed: EnvServer) -> None:
    noise = np.random.default_rng(0).bytes(100_000)
    for _ in range(20):
        with socket.create_connection(where(undisturbed.address), 10.0) as line:
            line.settimeout(10.0)
            with contextlib.suppress(OSError):
                line.sendall(noise)
                while line.recv(65536):
                    pass
    with plain_channel(undisturbed.address) as channel:
        for path in (ENV_JOIN, "/rlmesh.env.v1.EnvService/Handshake", "/no.such/Call"):
            ended_with(channel, path, body=noise)


def test_a_slow_sender_disturbs_no_other_client(undisturbed: EnvServer) -> None:
    greeting = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    with socket.create_connection(where(undisturbed.address), 10.0) as line:
        for byte in greeting:
            line.sendall(bytes([byte]))
            assert check_health(ConnectOptions(undisturbed.address)).is_serving


@pytest.mark.slow  # each stream has a thread of its client
def test_a_world_with_many_agents_has_a_stream_for_each() -> None:
    num_lanes = 300
    with EnvServer(
        "CartPole-v1", num_envs=num_lanes, max_sessions=1, autoreset="disabled"
    ) as server:
        env = RemoteVectorEnv(
            ConnectOptions(f"dm_env_rpc://{server.address}", timeout_s=60.0),
            dm_env_rpc=DmEnvRpcSettings(num_envs=num_lanes, one_world=True),
        )
        env.reset()
        env.close()


def test_calls_beyond_the_limit_are_refused_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_server, "max_calls", lambda *_: 4)
    with EnvServer("CartPole-v1") as server, contextlib.ExitStack() as open_calls:
        env = EnvClient(ConnectOptions(server.address))
        env.reset()
        channel = open_calls.enter_context(plain_channel(server.address))
        for _ in range(3):
            watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=30.0)
            next(watch)
            open_calls.callback(watch.cancel)
        code, _, _ = ended_with(channel, "/grpc.health.v1.Health/Check")

        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        with pytest.raises(CapacityError, match="as many calls as it takes at a time"):
            RemoteEnv(server.address)
        env.reset()
        open_calls.close()
        assert eventually(lambda: check_health(ConnectOptions(server.address)).is_serving)
        env.close()


# --- file descriptors and processes ------------------------------------------------------


def leave_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process, as far as it knows, no file descriptors left."""
    num_open = len(os.listdir("/dev/fd"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_open, num_open))


def test_who_finds_no_descriptors_left_is_refused_immediately_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        EnvServer("CartPole-v1", max_sessions=4) as env,
        ModelServer(
            zeros, address=ListenOptions(openpi="127.0.0.1:0"), openpi_env=OPENPI_CONTRACT
        ) as model,
        GatewayServer(lambda: [Target("0", 1, env.address)]) as gateway,
        contextlib.closing(RemoteEnv(env.address)) as earlier,
    ):
        clients: list[Callable[[], Any]] = [
            lambda: RemoteEnv(env.address).reset(),
            lambda: RemoteEnv(gateway.address),
            lambda: RemoteEnv(ConnectOptions(f"dm_env_rpc://{env.address}", timeout_s=0.05)),
            lambda: RemoteModel(model.address).configure_route(OPENPI_CONTRACT),
            lambda: RemoteModel(f"openpi://{model.openpi_address}"),
        ]
        earlier.reset()
        with monkeypatch.context() as patch:
            leave_no_descriptors(patch)
            for open_client in clients:
                with pytest.raises(CapacityError, match=r"file descriptors open.*ulimit -n"):
                    open_client()
            assert env.statistics().sessions.refused == 2  # the gateway has not asked it
        earlier.step(0)
        RemoteModel(model.address).configure_route(OPENPI_CONTRACT)


def test_a_simulator_that_finds_no_descriptors_left_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rllink_server(RLlinkLimits()) as server:
        leave_no_descriptors(monkeypatch)
        with pytest.raises(EndpointLostError, match="it may be full"):
            RLlinkClient(server.address, token="s3cret", encoding=JSON)


def test_a_process_that_cannot_be_started_is_reported_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    before = worker_pids()
    with (
        EnvServer("CartPole-v1", max_sessions=3, allow_calls=("spec",)) as server,
        contextlib.closing(RemoteEnv(server.address)) as earlier,
    ):
        earlier.reset()
        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "Popen", fail)
            for ask in ("reset", "call"):
                later = RemoteEnv(server.address)
                with pytest.raises(CapacityError, match=r"no more processes.*ulimit"):
                    later.reset() if ask == "reset" else later.call("spec")
            (pid,) = worker_pids() - before
            os.kill(pid, signal.SIGKILL)
            # Its session lasts: its lanes are lost with any environment that crashes.
            for _ in range(2):
                with pytest.raises(RemoteEnvError) as caught:
                    earlier.reset()
            assert "no more processes" in caught.value.message
            assert caught.value.is_recoverable
        earlier.reset()


# --- RLlink ----------------------------------------------------------------------------


class Trainer:
    """Tells how to sample."""

    def admit(self, peer: str, dialect: object) -> "Trainer":
        return self

    def receive(self, request: m.Request) -> m.Reply:
        return m.SetConfig(1, True)

    def leave(self) -> None:
        pass


@contextlib.contextmanager
def rllink_server(limits: RLlinkLimits) -> Iterator[RLlinkServer]:
    server = RLlinkServer(Trainer().admit, token="s3cret", limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_strangers_take_no_places_from_clients() -> None:
    limits = RLlinkLimits(max_clients=2, max_strangers=4)
    with rllink_server(limits) as server, contextlib.ExitStack() as lines:
        client = lines.enter_context(RLlinkClient(server.address, token="s3cret"))
        strangers = [
            lines.enter_context(socket.create_connection(where(server.address), 10.0))
            for _ in range(20)
        ]

        assert client.get_config().env_steps_per_sample == 1
        another = lines.enter_context(RLlinkClient(server.address, token="s3cret"))
        assert another.get_config().env_steps_per_sample == 1
        # The oldest had to go.
        strangers[0].settimeout(10.0)
        assert _is_closed(strangers[0])
        # And clients beyond theirs find no place.
        with pytest.raises(EndpointLostError, match="full"):
            RLlinkClient(server.address, token="s3cret")


def test_a_stranger_has_little_time() -> None:
    with (
        rllink_server(RLlinkLimits(stranger_timeout_s=1.5)) as server,
        socket.create_connection(where(server.address), 10.0) as mute,
        socket.create_connection(where(server.address), 10.0) as slow,
        RLlinkClient(server.address, token="s3cret", timeout_s=10.0) as client,
    ):
        slow.sendall(framed(JSON.pack_request(m.Ping("s3cret")))[:-1])
        for line in (mute, slow):
            line.settimeout(10.0)
            assert _is_closed(line)
        # Who has shown the token may be silent.
        assert client.get_config().env_steps_per_sample == 1


def _is_closed(line: socket.socket) -> bool:
    try:
        return line.recv(1) == b""
    except ConnectionResetError:
        return True


# --- large messages --------------------------------------------------------------------


LIMIT_BYTES = 8 * 2**20
SLACK_BYTES = 8 * 2**20
"""For what the allocator keeps."""
NUM_LARGE = 14
"""Twice as many as there may be copies of them at a time."""
CHECK, HANDSHAKE = "/grpc.health.v1.Health/Check", "/rlmesh.model.v1.ModelService/Handshake"


class OwnProcess:
    """A policy's endpoint in a process whose memory is watched."""

    def __init__(self) -> None:
        code = f"""
            import sys
            from rlmesh_ray import ModelServer
            with ModelServer(len, max_message_bytes={LIMIT_BYTES}) as server:
                print(server.address, flush=True)
                sys.stdin.read()
        """
        command = [sys.executable, "-c", textwrap.dedent(code)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def memory_bytes(self) -> int:
        """Return how much of its memory is resident."""
        return self._memory("VmRSS")

    def peak_bytes(self) -> int:
        """Return how much was at most, since ``forget_peak``."""
        return self._memory("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self._process.pid}/clear_refs").write_text("5")

    def close(self) -> None:
        self._process.communicate("")

    def _memory(self, key: str) -> int:
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (line,) = (line for line in lines if line.startswith(key))
        return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def own_process() -> Iterator[OwnProcess]:
    with contextlib.closing(OwnProcess()) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "compression"),
    [
        pytest.param(HANDSHAKE, grpc.Compression.NoCompression, id="plain"),
        pytest.param(MODEL_JOIN, grpc.Compression.Gzip, id="gzip"),
    ],
)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_messages_and_bombs_cost_a_policys_endpoint_little_memory(
    path: str, compression: grpc.Compression, own_process: OwnProcess
) -> None:
    server = own_process
    with plain_channel(
        server.address, [("grpc.max_send_message_length", -1)], compression=compression
    ) as channel:
        ended_with(channel, path, body=b"?")
        before = server.memory_bytes()

        # Refused as a whole, packed or not, before more than the limit has been read.
        server.forget_peak()
        for size in (LIMIT_BYTES + 1, 8 * LIMIT_BYTES):
            code, details, _ = ended_with(channel, path, body=bytes(size))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "larger than max" in details
        assert server.peak_bytes() - before <= 2 * LIMIT_BYTES + SLACK_BYTES

        # Taken, and found to be nonsense. gRPC holds a message three times for a moment, which on a
        # busy machine may be the moment of the next one, too; but none of them stays.
        server.forget_peak()
        for _ in range(NUM_LARGE):
            code, _, _ = ended_with(channel, path, body=bytes(LIMIT_BYTES))
            assert code is not grpc.StatusCode.RESOURCE_EXHAUSTED
            ended_with(channel, path, body=b"?")
        assert server.peak_bytes() - before <= 6 * LIMIT_BYTES + SLACK_BYTES


def test_too_large_a_request_is_refused_with_the_limit_and_how_to_raise_it() -> None:
    wide = contract_of_width(2000)  # of 64 bytes each
    with ModelServer(zeros, max_message_bytes=2**16) as server:
        model = RemoteModel(server.address)
        model.configure_route(wide)
        with pytest.raises(EndpointError, match=r"size limit.* 65536.*max_message_bytes") as caught:
            model.predict(np.zeros((2000, 16), np.float32))
        model.close()

    assert "--max-message-bytes" in str(caught.value)


def contract_of_width(num_envs: int) -> EnvContract:
    return EnvContract(
        "Wide-v0",
        from_gymnasium(gymnasium.spaces.Box(-1, 1, (16,), np.float32)),
        from_gymnasium(gymnasium.spaces.Discrete(2)),
        num_envs,
        AutoresetMode.NEXT_STEP,
    )


class OneSpace:
    """A policy that tells the only observations that it acts on, of 4 KiB a lane."""

    traits = PolicyTraits(observation_space=from_gymnasium(gymnasium.spaces.Box(-1, 1, (1024,))))

    def check_contract(self, contract: EnvContract) -> None:
        pass

    def predict(self, contract: EnvContract, rows: Rows) -> object:
        return np.zeros(rows.num_rows, np.int64)

    def forget(self, route_key: str, env_index: int | None) -> None:
        pass


@pytest.mark.parametrize(
    ("options", "limit_bytes"),
    [
        ({"max_batch_rows": 1}, 4 * 2**20),
        ({"max_batch_rows": 4096}, 20 * 2**20),
        ({"max_batch_rows": 4096, "max_message_bytes": 2**17}, 2**17),
    ],
)
def test_the_limit_follows_from_a_policys_own_observations_unless_the_operator_sets_it(
    options: dict[str, int], limit_bytes: int
) -> None:
    with (
        ModelServer(OneSpace(), **options) as server,  # type: ignore[arg-type]
        plain_channel(server.address) as channel,
    ):
        taken, _, _ = ended_with(channel, CHECK, body=bytes(limit_bytes))
        refused, details, _ = ended_with(channel, CHECK, body=bytes(limit_bytes + 2**20))

    assert taken is grpc.StatusCode.INVALID_ARGUMENT
    assert refused is grpc.StatusCode.RESOURCE_EXHAUSTED
    limit = int(re.findall(r"vs\. (\d+)", details)[0])
    assert limit_bytes <= limit < 1.1 * limit_bytes


def test_a_policy_that_does_not_tell_its_observations_gets_32_mib() -> None:
    with ModelServer(zeros) as server, plain_channel(server.address) as channel:
        code, details, _ = ended_with(channel, CHECK, body=bytes(2**25 + 1))

    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(2**25) in details


@pytest.mark.parametrize("size", [0, 2**16 - 1, 2**31, 1.5, "1", True])
def test_a_limit_that_no_message_fits_or_none_can_have_is_refused(size: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^max_message_bytes="):
        ModelServer(zeros, max_message_bytes=size)


# --- ports -----------------------------------------------------------------------------


PAIRS = [
    ("127.0.0.1", "127.0.0.1"),
    ("0.0.0.0", "127.0.0.1"),
    ("127.0.0.1", "0.0.0.0"),
    ("0.0.0.0", "0.0.0.0"),
    ("[::]", "0.0.0.0"),
    ("0.0.0.0", "[::]"),
    ("[::]", "[::1]"),
    ("[::]", "127.0.0.1"),
]
KINDS: dict[str, Callable[[str], Any]] = {
    "env": lambda address: EnvServer("CartPole-v1", address=address, token="s3cret"),
    "model": lambda address: ModelServer(zeros, address=address, token="s3cret"),
    "rllink": lambda address: RLlinkServer(Trainer().admit, address=address, token="s3cret"),
}


@pytest.mark.parametrize(
    ("kinds", "first", "second"),
    [
        (kinds, *pair)
        for kinds in (("model", "model"), ("rllink", "model"), ("model", "rllink"))
        for pair in PAIRS
    ]
    + [(("model", "env"), *PAIRS[0])],
)
def test_two_endpoints_never_share_a_port(kinds: tuple[str, str], first: str, second: str) -> None:
    if not socket.has_dualstack_ipv6() and "[" in first + second:
        pytest.skip("this machine has no IPv6")
    one = KINDS[kinds[0]](f"{first}:0")
    one.start()
    try:
        _, port = where(one.address)
        two = KINDS[kinds[1]](f"{second}:{port}")
        try:
            with pytest.raises(AddressError, match=r"(choose|give) another port"):
                two.start()
        finally:
            two.stop()
    finally:
        one.stop()


def test_two_endpoints_never_share_a_path(tmp_path: Any) -> None:
    address = f"unix:{tmp_path / 'socket'}"
    with ModelServer(zeros, address=address):
        with pytest.raises(AddressError, match="another server"):
            ModelServer(zeros, address=address).start()
        assert check_health(ConnectOptions(address)).is_serving


def test_a_port_that_was_taken_is_tried_again_with_success() -> None:
    address = free_address()
    first = ModelServer(zeros, address=address).start()
    second = ModelServer(zeros, address=address)
    with pytest.raises(AddressError):
        second.start()
    first.stop()

    with ModelServer(zeros, address=address):
        assert check_health(ConnectOptions(address)).is_serving
