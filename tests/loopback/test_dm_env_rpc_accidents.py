"""Our client where a dm_env_rpc server, or the user of the client, does something unexpected."""

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb

from rlmesh_ray import EnvServer, ModelServer, RemoteVectorEnv
from rlmesh_ray.auth.client_tls import ClientTls
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import StepResult
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.dialects.dm_env_rpc.client.env_session_client import WorldClient
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    ConformanceError,
    EndpointError,
    EndpointLostError,
    EndpointUnreachableError,
    LocalProtocolError,
    RemoteEnvError,
    RemoteProtocolError,
    UnsupportedSpaceError,
)
from tests.loopback.dm_env_rpc_peer import CUT, RUNNING, SILENT, Conduct, Peer, spec, specs
from tests.loopback.dm_env_rpc_stream import PROCESS
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel

MOVE = {3: spec("move", np.int8, (), -1, 1)}
INVALID = 3


def client(peer: Peer, num_envs: int = 2, *, wait_s: float = 10.0, **more: Any) -> WorldClient:
    settings = DmEnvRpcSettings(num_envs=num_envs, **more)
    return WorldClient(
        ConnectOptions(peer.address, timeout_s=wait_s),
        settings,
        step_timeout_s=wait_s,
        reset_timeout_s=wait_s,
    )


def streams_of(env: WorldClient) -> list[JoinStream]:
    return [agent.open_stream.stream for agent in env.joiner.agents]


def moves(*each: int) -> list[Any]:
    return [np.array(each, np.int8)]


def shown(result: StepResult) -> Any:
    return np.asarray(result.observation[0]).tolist()


def test_a_shared_world_that_is_lost_is_created_anew_for_all() -> None:
    with Peer(Conduct(refusals={"join_world": [CUT] * 3})) as peer:
        env = client(peer, 3, one_world=True)
        env.reset()
        env.close()

        # Who is cut off first takes the others along, whose requests may not have arrived by then.
        kinds = peer.kinds()
        assert kinds.count("create_world") >= 2
        assert "".join(kinds).rpartition("create_world")[2].count("join_world") >= 3


@pytest.mark.parametrize("kind", ["create_world", "join_world", "reset", "step"])
@pytest.mark.parametrize("code", [CUT, SILENT])
def test_a_server_that_goes_away_at_any_point_raises_our_errors(kind: str, code: int) -> None:
    def play(peer: Peer) -> None:
        with contextlib.closing(client(peer, wait_s=0.3)) as env:
            env.reset()
            env.reset()

    with Peer(Conduct(refusals={kind: [code] * 99})) as peer, pytest.raises(EndpointError):
        play(peer)


class Repeater:
    """Passes on what a dm_env_rpc server answers, and once, on request, twice.

    Args:
        address: Of the server, HOST:PORT.
        kind: Of the next answer to repeat; empty: none.
    """

    def __init__(self, address: str, kind: str = "") -> None:
        self.kind = kind
        self.has_repeated = threading.Event()
        self._channel = plain_channel(address)
        self._server = grpc.server(ThreadPoolExecutor(8))
        service, method = PROCESS[1:].split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._process)}
        handler = grpc.method_handlers_generic_handler(service, handlers)
        self._server.add_generic_rpc_handlers((handler,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def address(self) -> str:
        return f"dm_env_rpc://127.0.0.1:{self.port}"

    def _process(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        answers: Any = self._channel.stream_stream(PROCESS)(requests)
        context.add_callback(answers.cancel)
        while (answer := self._next(answers)) is not None:
            kind = pb.EnvironmentResponse.FromString(answer).WhichOneof("payload")
            is_repeated = kind == self.kind
            if is_repeated:
                self.kind = ""
            yield answer
            if is_repeated:
                yield answer
                # gRPC asks for another when it has sent that one.
                self.has_repeated.set()

    @staticmethod
    def _next(answers: Any) -> bytes | None:
        try:
            return next(answers, None)
        except grpc.RpcError:  # its client has ended the call
            return None

    def __enter__(self) -> "Repeater":
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(0.0).wait()
        self._channel.close()


def begun(address: str, settings: DmEnvRpcSettings) -> WorldClient:
    """Return a session whose episodes have begun."""
    env = WorldClient(ConnectOptions(address, timeout_s=10.0), settings, step_timeout_s=10.0)
    env.reset()
    return env


@pytest.fixture(scope="module")
def cart_poles() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(DmEnvRpcSettings(), id="one stream"),
        pytest.param(DmEnvRpcSettings(2), id="streams"),
        pytest.param(DmEnvRpcSettings(2, one_world=True), id="one world"),
        pytest.param(DmEnvRpcSettings(batched=True), id="batched"),
    ],
)
def test_an_answer_that_is_here_before_its_request_ends_the_session(
    cart_poles: EnvServer, settings: DmEnvRpcSettings
) -> None:
    with Repeater(cart_poles.address.removeprefix("rlmesh://")) as server:
        env = begun(server.address, settings)
        action = [np.ones(env.contract.num_envs, np.int64)]
        env.step(action)
        server.kind = "step"
        env.step(action)
        assert server.has_repeated.wait(10.0)

        streams = streams_of(env)
        assert eventually(lambda: any(stream.poll() for stream in streams))

        with pytest.raises(RemoteProtocolError, match="kind step came before its request"):
            env.step(action)
        with pytest.raises(EndpointLostError, match="answer each request once"):
            env.step(action)
        env.close()

    assert eventually(lambda: cart_poles.num_sessions == 0)


@pytest.mark.parametrize("kind", ["create_world", "join_world", "reset"])
def test_an_answer_of_another_kind_that_comes_twice_is_an_error_too(kind: str) -> None:
    with Peer() as peer, Repeater(f"127.0.0.1:{peer.port}", kind) as server:
        with pytest.raises(RemoteProtocolError, match=kind):
            begun(server.address, DmEnvRpcSettings(2, reset={"seed": 1}))
        assert not server.kind


@pytest.mark.parametrize("is_late", [False, True])
def test_a_session_that_is_left_after_an_answer_too_many_says_so_and_leaves_its_world(
    is_late: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Peer() as peer, Repeater(f"127.0.0.1:{peer.port}") as server:
        env = begun(server.address, DmEnvRpcSettings())
        server.kind = "step"
        env.step(moves(1))
        assert server.has_repeated.wait(10.0)
        if is_late:
            monkeypatch.setattr(JoinStream, "poll", lambda _: False)
        with caplog.at_level(logging.WARNING, "rlmesh_ray"):
            env.close()

        assert peer.kinds()[-2:] == ["leave_world", "destroy_world"]
        [reported] = [
            one.getMessage() for one in caplog.records if one.name.startswith("rlmesh_ray")
        ]
        assert "lane 0: " in reported
        assert "sent more answers than there were requests" in reported


def test_answers_to_requests_in_flight_are_none_too_many() -> None:
    with Peer(Conduct(length=99)) as peer:
        env = client(peer)
        env.reset()
        requests = [env.send_step(moves(1, 1)) for _ in range(2)]
        results = []
        for _ in range(20):
            results.append(shown(env.receive_step(requests.pop(0))))
            streams = streams_of(env)
            assert all(eventually(stream.poll) for stream in streams)
            requests.append(env.send_step(moves(1, 1)))
        results += [shown(env.receive_step(request)) for request in requests]

        assert results == [[[count, count]] * 2 for count in range(1, 23)]
        env.close()


class Worthless(gymnasium.Env[Any, Any]):
    """Has rewards that are no numbers."""

    observation_space = action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        return 0, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return 0, math.nan, False, False, {}


def test_the_rewards_of_a_batch_are_looked_at_too() -> None:
    with EnvServer(Worthless, num_envs=2) as server:
        address = f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}"
        env = begun(address, DmEnvRpcSettings(batched=True, validation="strict"))
        with pytest.raises(RemoteEnvError, match=r"reward: nan is not finite \(lane 0\)"):
            env.step([np.zeros(2, np.int64)])
        env.close()


def test_what_ctrl_c_has_left_unread_is_no_answer_to_the_next_step() -> None:
    with Peer() as peer:
        env = client(peer, 1)
        env.reset()
        peer.conduct.refusals["step"] = [SILENT]
        num_steps = peer.kinds().count("step")

        def interrupt_the_next_step() -> None:
            assert eventually(lambda: peer.kinds().count("step") > num_steps)
            os.kill(os.getpid(), signal.SIGINT)

        with ThreadPoolExecutor(1) as aside:
            interrupting = aside.submit(interrupt_the_next_step)
            with pytest.raises(KeyboardInterrupt):
                env.step(moves(1))
            interrupting.result(60.0)

        with pytest.raises(EndpointLostError, match="KeyboardInterrupt"):
            env.step(moves(1))
        env.close()


def test_episodes_that_a_refusal_has_holed_have_no_record() -> None:
    with Peer(Conduct(length=2)) as peer:
        env = client(peer)
        env.reset()
        peer.conduct.refusals["step"] = [INVALID]
        with pytest.raises(RemoteEnvError):
            env.step(moves(1, 1))

        assert not env.step(moves(1, 1)).completed_episodes
        assert not env.step(moves(1, 1)).completed_episodes
        env.reset()
        env.step(moves(1, 1))
        assert [one.step_count for one in env.step(moves(1, 1)).completed_episodes] == [2, 2]
        env.close()


def test_a_lane_alone_goes_on_after_a_refusal() -> None:
    with Peer(Conduct(length=2)) as peer:
        env = client(peer, 1)
        env.reset()
        peer.conduct.refusals["step"] = [INVALID]
        with pytest.raises(RemoteEnvError):
            env.step(moves(1))
        env.step(moves(1))

        assert [one.step_count for one in env.step(moves(1)).completed_episodes] == [2]
        env.close()


def test_an_action_that_cannot_travel_leaves_no_lane_ahead_of_the_others() -> None:
    say = pb.TensorSpec(name="say", dtype=pb.STRING)
    reported = specs({**MOVE, 4: say}, {2: spec("place.seed", np.int64)})
    with Peer(Conduct(specs=reported)) as peer:
        env = client(peer)
        env.reset()
        num_steps = peer.kinds().count("step")
        with pytest.raises(CodecError, match="UTF-8"):
            env.step([*moves(1, 1), ("hello", "\ud800")])
        env.step([*moves(1, 1), ("hello", "you")])
        env.close()

        assert peer.kinds().count("step") == num_steps + 2


@pytest.mark.parametrize("from_zero", [True, False])
def test_an_action_out_of_range_is_refused_and_never_wraps(from_zero: bool) -> None:
    kind = np.uint8 if from_zero else np.bool_
    with Peer(
        Conduct(specs=specs({3: spec("move", kind)}, {2: spec("place.seed", np.int64)}))
    ) as peer:
        if from_zero:
            peer.conduct.specs.actions[3].CopyFrom(spec("move", np.uint8, (), 5, 7))
        env = client(peer, 1, choices_from_zero=from_zero)
        env.reset()
        num_steps = peer.kinds().count("step")
        with pytest.raises(ConformanceError, match="move"):
            env.step([np.array([258])])
        with pytest.raises(ConformanceError, match="move"):
            env.step([np.array([-1])])

        assert peer.kinds().count("step") == num_steps
        env.step([np.array([1])])
        env.close()
        [sent] = [message.actions[3] for _, kind, message in peer.requests if kind == "step"][-1:]
        assert (sent.uint8s.array == b"\x06") if from_zero else sent.bools.array == [True]


def test_asking_for_the_wrong_answer_loses_none() -> None:
    with Peer() as peer:
        env = client(peer)
        env.reset()
        step = env.send_step(moves(1, 1))
        with pytest.raises(LocalProtocolError, match="was a step"):
            env.receive_reset(step)
        assert shown(env.receive_step(step)) == [[1, 1], [1, 1]]
        env.close()


@pytest.mark.parametrize(
    "options",
    [{1: 2}, {"x": None}, {"x": object()}, {"x": [1, "a"]}, {"\ud800": 1}, {"x": 2**70}],
)
def test_options_that_cannot_travel_are_refused_and_nothing_is_sent(options: Any) -> None:
    with Peer() as peer:
        env = client(peer)
        with pytest.raises(ConfigurationError, match="cannot travel"):
            env.reset(options=options)
        assert "reset" not in peer.kinds()
        env.reset()
        env.close()


def test_answers_out_of_order_end_the_session() -> None:
    def confuse(step: Any) -> None:
        step.state = RUNNING

    with Peer(Conduct(length=1, alter=confuse)) as peer:
        env = client(peer)
        env.reset()
        for _ in range(20):  # endless RUNNING is legal
            assert not env.step(moves(0, 0)).terminated.any()
        peer.conduct.alter = lambda step: step.observations.clear()
        with pytest.raises(RemoteProtocolError, match="asked for"):
            env.step(moves(0, 0))
        env.close()


def test_observations_that_were_not_requested_are_left_alone() -> None:
    def babble(step: Any) -> None:
        step.observations[2**64 - 1].floats.array.append(1)
        step.observations[99].shape.append(-7)

    with Peer(Conduct(alter=babble)) as peer:
        env = client(peer)
        env.reset()
        assert shown(env.step(moves(1, 1))) == [[1, 1], [1, 1]]
        env.close()


@pytest.mark.parametrize(
    "odd",
    [
        {1: pb.TensorSpec(name="huge", dtype=pb.FLOAT, shape=[2**31 - 1] * 4)},
        {1: pb.TensorSpec(name="dark", dtype=pb.BOOL, shape=[2**31 - 1] * 2)},
        {1: pb.TensorSpec(name="odd", dtype=pb.FLOAT, min={"int32s": {"array": [1]}})},
        {1: pb.TensorSpec(name="nan", dtype=pb.FLOAT, max={"floats": {"array": [np.nan]}})},
        {
            1: pb.TensorSpec(
                name="many", dtype=pb.FLOAT, shape=[2], max={"floats": {"array": [1] * 3}}
            )
        },
        {k: pb.TensorSpec(name=f"any.{k}", dtype=pb.PROTO) for k in range(3000)},
    ],
)
def test_specs_that_make_no_space_are_refused_soon(odd: Any) -> None:
    with (
        Peer(Conduct(specs=specs(MOVE, odd))) as peer,
        pytest.raises((UnsupportedSpaceError, RemoteProtocolError)),
    ):
        client(peer)


def test_thousands_of_tensors_are_no_trouble() -> None:
    many = {uid: spec(f"part{uid % 50}.n{uid}", np.float32) for uid in range(2000)}
    with Peer(Conduct(specs=specs(MOVE, many))) as peer:
        env = client(peer, 1)
        assert len(env.contract.observation_space.items) == 50  # type: ignore[union-attr]
        env.close()


def test_a_server_without_tls_is_not_waited_for() -> None:
    with Peer() as peer:
        begun_s = time.monotonic()
        with pytest.raises(EndpointUnreachableError, match="does not use TLS"):
            RemoteVectorEnv(ConnectOptions(peer.address, tls=ClientTls(), timeout_s=20.0))
        assert time.monotonic() - begun_s < 10.0


def test_a_server_of_another_service_is_recognized() -> None:
    with (
        ModelServer(lambda observations: observations) as server,
        pytest.raises(EndpointUnreachableError, match=r"does not speak dm_env_rpc.*dm-env-rpc\]"),
    ):
        # A model endpoint, as one for environments without the extra, knows no such method.
        RemoteVectorEnv(f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}")


@pytest.mark.parametrize("batched", [True, False])
def test_a_reset_may_follow_a_step_whose_answer_is_still_to_come(batched: bool) -> None:
    settings = DmEnvRpcSettings(batched=True) if batched else DmEnvRpcSettings(3, one_world=True)
    with EnvServer("CartPole-v1", num_envs=3) as server:
        address = f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}"
        lanes = WorldClient(ConnectOptions(address), settings, step_timeout_s=5.0)
        lanes.reset(seeds=(1, 2, 3))
        pushed = [np.array([1, 1, 0])]
        while not (ended := np.flatnonzero(lanes.step(pushed).terminated)).size:
            pass
        assert ended.size < 3

        # As runners do: what ended begins anew within the step, and then once more, on record.
        step = lanes.send_step(pushed)
        reset = lanes.send_reset(lanes=ended.tolist())
        stepped = lanes.receive_step(step)
        begun = lanes.receive_reset(reset)
        others = [lane for lane in range(3) if lane not in ended]
        assert (stepped.rewards[ended] == 0).all()
        places, expected = np.asarray(begun.observation[0]), np.asarray(stepped.observation[0])
        np.testing.assert_array_equal(places[others], expected[others])
        assert all(begun.episode_ids[lane] for lane in ended.tolist())
        assert (lanes.step(pushed).rewards[ended] == 1).all()
        lanes.close()
