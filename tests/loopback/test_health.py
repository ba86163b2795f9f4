"""Health that tells the truth, and endpoints that take no new sessions but finish the old ones."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rlmesh_ray import EnvServer, ModelServer, RemoteEnv, RemoteModel
from rlmesh_ray.cli.main import main
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.client.health import EndpointHealth, HealthStatus, check_health
from rlmesh_ray.client.model.remote_model import contract_of
from rlmesh_ray.errors import AccessDeniedError, EndpointError
from rlmesh_ray.models.policy import PolicyTraits, Rows
from rlmesh_ray.server.endpoint import endpoint as endpoint_module
from rlmesh_ray.server.endpoint import event_loop as loop_module
from rlmesh_ray.server.endpoint.endpoint import Endpoint
from rlmesh_ray.server.endpoint.event_loop import shared_loop
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.server.env import env_server as env_server_module
from rlmesh_ray.server.env.env_service import SERVICE as ENV
from rlmesh_ray.server.model.model_service import SERVICE as MODEL
from rlmesh_ray.spaces.contract import EnvContract
from tests.loopback.child_processes import worker_pids
from tests.loopback.client_internals import vanish
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel
from tests.loopback.raw_join import ENV_JOIN, RawJoin

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Plain:
    """A client that knows nothing of this package: gRPC's own stubs over a plain channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._stub: Any = health_pb2_grpc.HealthStub(channel)

    def check(self, service: str = "", **options: Any) -> int:
        request = health_pb2.HealthCheckRequest(service=service)
        status: int = self._stub.Check(request, timeout=20.0, **options).status
        return status

    def watch(self, service: str = "", **options: Any) -> Any:
        request = health_pb2.HealthCheckRequest(service=service)
        return self._stub.Watch(request, timeout=60.0, **options)


def zeros(batch: Any) -> Any:
    return np.zeros(len(batch), np.int64)


def env_server() -> EnvServer:
    return EnvServer("CartPole-v1")


def model_server() -> ModelServer:
    return ModelServer(zeros)


def endpoint(probe: Callable[[], Health]) -> Endpoint:
    """Return an endpoint that offers nothing but its health."""
    started = Endpoint("127.0.0.1:0", on_stop=lambda: None, probe=probe)
    started.start([], max_receive_bytes=1 << 20)
    return started


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


# --- asking ----------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "name"), [(env_server, ENV), (model_server, MODEL)])
def test_any_grpc_client_can_ask_for_the_health(
    make: Callable[[], EnvServer | ModelServer], name: str
) -> None:
    with make() as server, plain_channel(server.address) as channel:
        plain = Plain(channel)

        assert plain.check() == SERVING
        assert plain.check(name) == SERVING
        assert check_health(ConnectOptions(server.address)).is_serving
        assert check_health(ConnectOptions(server.address), name).is_serving


def test_a_service_that_is_not_there_has_no_health() -> None:
    with model_server() as server, plain_channel(server.address) as channel:
        plain = Plain(channel)
        watch = plain.watch(ENV)

        with pytest.raises(grpc.RpcError) as caught:
            plain.check(ENV)

        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert check_health(ConnectOptions(server.address), ENV).status is HealthStatus.UNKNOWN
        assert next(watch).status == SERVICE_UNKNOWN
        watch.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
def test_a_question_that_does_not_decode_is_refused(method: str) -> None:
    served = endpoint(lambda: Health(True))
    with plain_channel(served.address) as channel:
        answers = channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff", timeout=20.0)
        with pytest.raises(grpc.RpcError) as caught:
            next(answers)

    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    served.stop()


def test_a_server_that_does_not_run_is_not_healthy() -> None:
    server = model_server()
    before = server.health()
    server.start()
    while_serving = server.health()
    server.stop()

    assert (before.is_serving, before.reason) == (False, "it has not been started")
    assert while_serving == Health(True)
    assert (server.health().is_serving, server.health().reason) == (False, "it has stopped")


# --- the truth -------------------------------------------------------------------------


def test_the_reason_reaches_who_asks_however_long_it_is() -> None:
    served = endpoint(lambda: Health(False, "ä" * 100_000))

    health = check_health(ConnectOptions(served.address))

    assert health.status is HealthStatus.NOT_SERVING
    assert health.reason.startswith("äää")
    served.stop()


@pytest.fixture
def _frequent_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlmesh_ray.server.endpoint.health.WATCH_PERIOD_S", 0.05)


@pytest.mark.usefixtures("_frequent_checks")
def test_a_watch_sees_what_only_the_probe_knows() -> None:
    health = Health(True)
    served = endpoint(lambda: health)
    with plain_channel(served.address) as channel:
        watch = Plain(channel).watch()
        first = next(watch).status
        health = Health(False, "stuck")
        second = next(watch).status
        health = Health(True)
        third = next(watch).status

    assert [first, second, third] == [SERVING, NOT_SERVING, SERVING]
    served.stop()


@pytest.mark.usefixtures("_frequent_checks")
def test_watches_that_were_left_are_not_kept() -> None:
    asked = threading.Semaphore(0)

    def probe() -> Health:
        asked.release()
        return Health(True)

    served = endpoint(probe)
    with plain_channel(served.address) as channel:
        next(Plain(channel).watch())
    while asked.acquire(timeout=0.5):
        pass  # a watcher that is left asks repeatedly

    served.stop()


def test_an_environment_that_hangs_is_no_reason_to_send_clients_away(
    aside: ThreadPoolExecutor,
) -> None:
    with EnvServer("CartPole-v1") as server:
        # Over shared memory a worker has 2 s to get ready for the first step.
        frozen = RemoteEnv(server.address, transport="grpc")
        frozen.reset()
        (worker,) = worker_pids()
        os.kill(worker, signal.SIGSTOP)
        try:
            step = aside.submit(frozen.step, 0)

            assert check_health(ConnectOptions(server.address)).is_serving
            other = RemoteEnv(server.address)
            other.reset()
            other.step(0)
            other.close()
            assert not step.done()
        finally:
            os.kill(worker, signal.SIGCONT)
        step.result(20.0)
        frozen.close()


def test_a_policy_that_hangs_at_the_check_of_an_environment_is_stuck(
    aside: ThreadPoolExecutor,
) -> None:
    may_end = threading.Event()

    class Checking:
        traits = PolicyTraits(checks_concurrently=True)

        def check_contract(self, contract: EnvContract) -> None:
            may_end.wait(60.0)

        def predict(self, contract: EnvContract, rows: Rows) -> object:
            return np.zeros(rows.num_rows, np.int64)

        def forget(self, route_key: str, env_index: int | None) -> None:
            pass

    with (
        ModelServer(Checking(), _stuck_after_s=0.05) as server,
        RemoteModel(server.address) as model,
    ):
        assert check_health(ConnectOptions(server.address)).is_serving
        asking = aside.submit(model.configure_route, gymnasium.make("CartPole-v1"))

        assert eventually(lambda: not check_health(ConnectOptions(server.address)).is_serving)
        may_end.set()
        asking.result(60.0)
        assert eventually(lambda: check_health(ConnectOptions(server.address)).is_serving)


# --- a serving loop that something holds -----------------------------------------------


@pytest.fixture
def hold_loop() -> Iterator[Callable[[], None]]:
    """Hold the process's serving loop from when this is called to the end of the test."""
    may_go_on = threading.Event()

    def hold() -> None:
        is_held = threading.Event()

        def wait() -> None:
            is_held.set()
            may_go_on.wait(30.0)

        shared_loop().post(wait)
        assert is_held.wait(30.0)

    yield hold
    may_go_on.set()
    shared_loop().run(asyncio.sleep(0))
    assert eventually(lambda: not worker_pids())  # they are ended now that the loop is free


@pytest.fixture
def _does_not_wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have servers wait 0.05 s for a loop that is held, instead of seconds."""
    monkeypatch.setattr(endpoint_module, "_LATE_S", 0.05)
    monkeypatch.setattr(env_server_module, "_CLOSE_S", 0.05)


@pytest.mark.usefixtures("_does_not_wait_long")
def test_health_is_reported_without_the_loop_and_names_one_that_is_held(
    hold_loop: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "_SILENT_S", 0.05)
    with model_server() as server:
        assert server.health() == Health(True)
        hold_loop()

        assert eventually(lambda: not server.health().is_serving)
        health = server.health()

    assert health.reason.startswith("the serving loop has not answered for")


def test_a_loop_that_answers_is_never_silent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class LateClock:
        """Between any two looks at it a minute passes."""

        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 60.0
            return self.now_s

    loop = shared_loop()
    loop.run(asyncio.sleep(0))
    monkeypatch.setattr(loop_module, "time", LateClock())

    silences = []
    for _ in range(3):
        silences.append(loop.unresponsive_for_s())
        loop.run(asyncio.sleep(0))  # it has answered before that

    assert silences == [0.0, 0.0, 0.0]


@pytest.mark.usefixtures("_does_not_wait_long")
@pytest.mark.parametrize("make", [env_server, model_server])
def test_a_held_loop_keeps_no_server_from_stopping(
    make: Callable[[], EnvServer | ModelServer],
    hold_loop: Callable[[], None],
) -> None:
    server = make().start()
    hold_loop()

    assert not server.drain(0.0)
    server.stop(0.0)

    assert server.wait(0.0)


# --- draining --------------------------------------------------------------------------


def test_a_draining_env_endpoint_finishes_its_sessions_and_admits_no_other(
    aside: ThreadPoolExecutor,
) -> None:
    with EnvServer("CartPole-v1") as server, plain_channel(server.address) as channel:
        env = RemoteEnv(server.address)
        env.reset()
        watch = Plain(channel).watch(ENV)
        assert next(watch).status == SERVING

        draining = aside.submit(server.drain, 60.0)

        assert next(watch).status == NOT_SERVING
        assert Plain(channel).check() == NOT_SERVING
        assert "draining" in server.health().reason
        with pytest.raises(EndpointError, match=r"draining: .* dial another endpoint"):
            RemoteEnv(server.address)
        env.step(0)
        env.reset()
        assert not draining.done()
        env.close()
        assert draining.result(20.0)


def test_a_draining_model_endpoint_finishes_its_sessions_and_admits_no_other() -> None:
    with ModelServer(zeros) as server:
        model = RemoteModel(server.address)
        model.configure_route(contract_of(gymnasium.make("CartPole-v1")))

        is_empty = server.drain(0.0)

        assert not is_empty
        assert (
            check_health(ConnectOptions(server.address), MODEL).status is HealthStatus.NOT_SERVING
        )
        with pytest.raises(EndpointError, match=r"draining: .* dial another endpoint"):
            RemoteModel(server.address)
        assert model.predict(np.zeros((1, 4), np.float32)).tolist() == [0]
        model.close()
        assert server.drain(20.0)


def test_a_drain_that_takes_too_long_says_so_and_stays() -> None:
    with EnvServer("CartPole-v1") as server:
        env = RemoteEnv(server.address)
        env.reset()  # the session is open for certain when a request has been answered

        for timeout_s in (0.0, 0.05):
            assert not server.drain(timeout_s)

        env.reset()
        env.close()
        assert server.drain(20.0)


def test_who_has_shaken_hands_before_the_drain_is_turned_away_at_the_join() -> None:
    with EnvServer("CartPole-v1") as server, plain_channel(server.address) as channel:
        server.drain(0.0)

        with RawJoin(channel, ENV_JOIN) as join, pytest.raises(grpc.RpcError) as caught:
            join.receive()

        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details().startswith("draining")
        assert server.num_sessions == 0


def test_a_drain_does_not_wait_for_who_has_vanished() -> None:
    with EnvServer("CartPole-v1") as server:
        client = EnvClient(ConnectOptions(server.address))
        client.reset()
        vanish(client)

        assert server.drain(20.0)
        client.close()


def test_a_server_without_sessions_is_drained_at_once() -> None:
    with model_server() as server:
        RemoteModel(server.address).close()

        assert server.drain(20.0)
        assert server.drain(0.0)

    assert server.drain(0.0)


def test_a_stop_ends_the_drain(aside: ThreadPoolExecutor) -> None:
    with model_server() as server:
        model = RemoteModel(server.address)
        model.configure_route(contract_of(gymnasium.make("CartPole-v1")))
        draining = aside.submit(server.drain, 60.0)

    assert draining.result(20.0)
    model.close()


def test_a_watch_hears_of_a_stop_and_ends_well() -> None:
    with model_server() as server, plain_channel(server.address) as channel:
        watch = Plain(channel).watch()
        assert next(watch).status == SERVING

        server.stop(grace_s=1000.0)

        assert [response.status for response in watch] == [NOT_SERVING]
        assert watch.code() is grpc.StatusCode.OK


def env_session(address: str) -> None:
    with contextlib.closing(RemoteEnv(address)) as env:
        env.reset()
        for _ in range(5):
            env.step(0)


def model_session(address: str) -> None:
    with RemoteModel(address) as model:
        model.configure_route(contract_of(gymnasium.make("CartPole-v1")))
        for _ in range(5):
            model.predict(np.zeros((1, 4), np.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "session"), [(env_server, env_session), (model_server, model_session)]
)
def test_a_drain_under_load_breaks_nothing_and_is_reported_before_a_client_is_refused(
    make: Callable[[], EnvServer | ModelServer],
    session: Callable[[str], None],
    aside: ThreadPoolExecutor,
) -> None:
    def work(address: str, done: threading.Semaphore) -> tuple[str, HealthStatus]:
        """Open sessions until one fails; return its error, and the health from then on."""
        try:
            while True:
                session(address)
                done.release()
        except EndpointError as error:
            return str(error), check_health(ConnectOptions(address)).status

    for _ in range(3):
        done = threading.Semaphore(0)
        with make() as server:
            working = [aside.submit(work, server.address, done) for _ in range(4)]
            for _ in working:
                assert done.acquire(timeout=60.0)

            assert server.drain(60.0)

            for task in working:
                error, health = task.result(60.0)
                assert "draining" in error
                assert health is HealthStatus.NOT_SERVING


# --- tokens ----------------------------------------------------------------------------


@pytest.mark.parametrize("metadata", [None, (("authorization", "Bearer wron"),)])
def test_the_health_is_behind_the_token_as_all_calls_are(metadata: Any) -> None:
    with ModelServer(zeros, token="wrong") as server, plain_channel(server.address) as channel:
        plain = Plain(channel)
        with pytest.raises(grpc.RpcError) as check:
            plain.check(metadata=metadata)
        with pytest.raises(grpc.RpcError) as watch:
            next(plain.watch(metadata=metadata))
        with pytest.raises(AccessDeniedError):
            check_health(ConnectOptions(server.address))

        assert check.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert watch.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert plain.check(metadata=(("authorization", "Bearer wrong"),)) == SERVING
        assert check_health(ConnectOptions(server.address, "wrong")).is_serving


def test_strangers_do_not_learn_that_an_endpoint_drains() -> None:
    with ModelServer(zeros, token="right") as server:
        server.drain(0.0)

        with pytest.raises(AccessDeniedError):
            RemoteModel(server.address, token="other")


# --- endpoints that do not tell --------------------------------------------------------


def test_an_endpoint_that_does_not_know_the_question_has_unknown_health() -> None:
    with ThreadPoolExecutor(1) as executor:
        foreign = grpc.server(executor)
        port = foreign.add_insecure_port("127.0.0.1:0")
        foreign.start()

        health = check_health(ConnectOptions(f"127.0.0.1:{port}"))

        foreign.stop(None).wait()
    assert health.status is HealthStatus.UNKNOWN
    assert "grpc.health.v1" in health.reason


@pytest.mark.parametrize("answer", [b"\xff", b"\x08\x63", b""])
def test_an_answer_that_makes_no_sense_is_unknown_health(answer: bytes) -> None:
    handler = grpc.unary_unary_rpc_method_handler(lambda _request, _context: answer)
    with ThreadPoolExecutor(1) as executor:
        foreign = grpc.server(executor)
        port = foreign.add_insecure_port("127.0.0.1:0")
        foreign.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": handler}),)
        )
        foreign.start()

        health = check_health(ConnectOptions(f"127.0.0.1:{port}"))

        foreign.stop(None).wait()
    assert health.status is HealthStatus.UNKNOWN


def test_an_address_without_an_answer_is_unreachable() -> None:
    health = check_health(ConnectOptions("127.0.0.1:9"))

    assert health.status is HealthStatus.UNREACHABLE
    assert "nothing answers" in health.reason


def test_who_accepts_and_says_nothing_is_unreachable_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connect_options = ConnectOptions(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)

        assert check_health(connect_options).status is HealthStatus.UNREACHABLE


def test_a_unix_socket_tells_its_health(tmp_path: Any) -> None:
    address = f"unix:{tmp_path / 'model.sock'}"
    with ModelServer(zeros, address=address):
        assert check_health(ConnectOptions(address)) == EndpointHealth(HealthStatus.SERVING)


# --- the command -----------------------------------------------------------------------


class Inspect:
    """The command, in this process; programs read ``reported``."""

    def __init__(self, capsys: pytest.CaptureFixture[str], patch: pytest.MonkeyPatch) -> None:
        self._capsys = capsys
        self._patch = patch
        self.reported: dict[str, Any] = {}
        self.errors = ""

    def __call__(self, *arguments: str, token: str = "") -> int:
        self._patch.setenv("RLMESH_RAY_TOKEN", token)
        code = main(["inspect", *arguments, "--json"])
        output, self.errors = self._capsys.readouterr()
        self.reported = json.loads(output)
        return code


@pytest.fixture
def inspect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Inspect:
    return Inspect(capsys, monkeypatch)


def test_inspect_is_a_probe_for_containers(inspect: Inspect) -> None:
    with model_server() as server:
        assert inspect("--health", server.address) == 0
        expected = {"event": "health", "address": server.address, "status": "SERVING", "reason": ""}
        assert inspect.reported == expected

        server.drain(0.0)

        assert inspect("--health", server.address) == 1
        assert inspect.reported["status"] == "NOT_SERVING"
        assert "not serving (it is draining" in inspect.errors
    assert inspect("--health", server.address) == 1
    assert inspect.reported["status"] == "UNREACHABLE"


def test_a_probe_for_containers_shows_the_token(inspect: Inspect) -> None:
    with ModelServer(zeros, token="secret") as server:
        assert inspect("--health", server.address, token="secret") == 0
        assert inspect("--health", server.address, token="other") == 1
        assert inspect.reported["type"] == "AccessDeniedError"


def test_inspect_shows_the_health_with_everything_else(inspect: Inspect) -> None:
    with EnvServer("CartPole-v1") as server:
        assert inspect(server.address) == 0

    assert inspect.reported["health"] == "SERVING"
    assert inspect.reported["service"] == "env"
    assert "serving" in inspect.errors
