"""The endpoint as a dm_env_rpc server, over real gRPC."""

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import dm_env.test_utils
import grpc
import gymnasium
import numpy as np
import pytest
from absl.testing import absltest
from dm_env_rpc.v1 import connection, dm_env_adaptor, tensor_utils
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from dm_env_rpc.v1.extensions import properties
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlmesh_ray import EnvServer, RemoteEnv
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import CONTRACT, contract_from_text
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.server.env.env_options import DEFAULT_MAX_SESSIONS
from rlmesh_ray.spaces.batch import flatten
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from tests.loopback.dm_env_rpc_stream import INTERRUPTED, RUNNING, TERMINATED, DmStream, tensors
from tests.loopback.eventually import eventually
from tests.loopback.ports import plain_channel

ACTION = 1  # uids count from 1


class Count(gymnasium.Env[Any, Any]):
    """Shows its seed's draw, its steps and its last action; ends after three steps."""

    def __init__(self, length: int = 3) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (3,), np.float64)
        self.action_space = spaces.Dict(
            {"x": spaces.Box(-5.0, 5.0, (2,), np.float32), "n": spaces.Discrete(4)}
        )
        self._length = length
        self._steps = 0
        self._draw = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self._steps, self._draw = 0, int(self.np_random.integers(1000))
        if options:
            self._draw = int(options["deep"]["draw"])
        return np.array([self._draw, 0.0, 0.0]), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        shown = np.array([self._draw, self._steps, float(action["x"].sum() + action["n"])])
        return shown, 0.1, self._steps >= self._length, False, {}


def endless() -> Count:
    return Count(10**9)


class SlowReset(Count):
    """Takes three seconds for each reset but the first, and makes a file before."""

    def __init__(self, length: int, begun: Path) -> None:
        super().__init__(length)
        self._begun = begun

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        if self._steps:
            self._begun.touch()
            time.sleep(3.0)
        return super().reset(seed=seed, options=options)


class Duel:
    """Two agents; ``a`` is out after two steps, the game is over after four."""

    possible_agents = ("a", "b")
    observation_spaces: ClassVar[Any] = dict.fromkeys("ab", spaces.Box(0.0, 9.0, (1,), np.float32))
    action_spaces: ClassVar[Any] = dict.fromkeys("ab", spaces.Discrete(5))

    def __init__(self) -> None:
        self.count = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self.count = 0
        return {agent: np.zeros(1, np.float32) for agent in "ab"}, {}

    def step(self, actions: dict[str, Any], /) -> tuple[Any, ...]:
        self.count += 1
        shown = np.array([sum(actions.values())], np.float32)
        is_over = self.count >= 4
        alive = "ab" if self.count <= 2 else "b"
        return (
            dict.fromkeys(alive, shown),
            {agent: float(actions.get(agent, 0)) for agent in alive},
            {"a": self.count >= 2, "b": is_over, "__all__": is_over},
            {"__all__": False},
            {},
        )

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture(scope="module")
def count() -> Iterator[EnvServer]:
    with EnvServer(Count) as server:
        yield server


@pytest.fixture(scope="module")
def pair() -> Iterator[EnvServer]:
    with EnvServer(endless, num_envs=2) as server:
        yield server


@pytest.fixture(scope="module")
def duel() -> Iterator[EnvServer]:
    with EnvServer(Duel) as server:
        yield server


def settled(server: EnvServer, num_sessions: int) -> bool:
    """Wait until that many places are taken, as long as that may take."""
    return eventually(lambda: server.num_sessions == num_sessions)


# --- one agent -------------------------------------------------------------------------


class TestThroughTheStockAdaptor(dm_env.test_utils.EnvironmentTestMixin, absltest.TestCase):
    """dm_env's own tests of an environment."""

    server: ClassVar[EnvServer]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.server = EnvServer(Count).start()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.server.stop()
        super().tearDownClass()

    def make_object_under_test(self) -> Any:
        channel = plain_channel(self.server.address)
        link = connection.Connection(channel)
        self.addCleanup(channel.close)
        self.addCleanup(link.close)
        return dm_env_adaptor.create_and_join_world(link, {"seed": 1}, {}).env

    def make_action_sequence(self) -> Any:
        for number in range(20):
            yield {"x": np.full(2, number % 3, np.float32), "n": number % 4}


@pytest.mark.parametrize(
    "name",
    [
        "nested",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SPACES if name != "nested"),
    ],
)
def test_an_environment_is_the_same_through_both_protocols_and_none(name: str) -> None:
    space, seed = SPACES[name], 7
    local = EchoEnv(space)
    local.action_space.seed(3)

    with (
        EnvServer(lambda: EchoEnv(space)) as server,
        RemoteEnv(server.address) as remote,
        DmStream(server.address) as stream,
    ):
        stream.join(stream.create(seed=seed))
        results: Any = local.reset(seed=seed)
        others: Any = remote.reset(seed=seed)
        state, shown = stream.step()
        for _ in range(60):
            assert same_bits(space, results[0], others[0], shown)
            if len(results) == 5:
                assert shown["reward"] == results[1] == others[1]
                assert state == expected_state(*results[2:4]) == expected_state(*others[2:4])
            else:
                assert (state, shown["reward"]) == (RUNNING, 0.0)
            if state != RUNNING:
                results, others = local.reset(), remote.reset()
                state, shown = stream.step()
            else:
                action = local.action_space.sample()
                results, others = local.step(action), remote.step(action)
                leaves = flatten(from_gymnasium(space), action)
                state, shown = stream.step(dict(enumerate(leaves, 1)))


def same_bits(space: Any, value: Any, other: Any, shown: dict[str, Any]) -> bool:
    spec = from_gymnasium(space)
    observations = [tensor for name, tensor in shown.items() if name != "reward"]
    return all(
        np.asarray(leaf).tobytes()
        == np.asarray(theirs).tobytes()
        == np.asarray(tensor, np.asarray(leaf).dtype).tobytes()
        for leaf, theirs, tensor in zip(
            flatten(spec, value), flatten(spec, other), observations, strict=True
        )
    )


def expected_state(is_terminated: bool, is_truncated: bool) -> int:
    if is_terminated:
        return TERMINATED
    return INTERRUPTED if is_truncated else RUNNING


def test_pipelined_requests_are_answered_in_order(count: EnvServer) -> None:
    with DmStream(count.address) as stream:
        stream.join(stream.create())
        stream.send(**stream.step_request())
        for _ in range(6):
            stream.send(**stream.step_request({ACTION: 1}))
        stream.send(reset={})
        stream.send(step={"actions": tensors({77: 1})})
        stream.send(leave_world={})
        stream.finish()

        answers = stream.rest()

    kinds = [answer.WhichOneof("payload") for answer in answers]
    assert kinds == ["step"] * 7 + ["reset", "step", "leave_world"]
    states = [answer.step.state for answer in answers[:7]]
    assert states == [RUNNING, RUNNING, RUNNING, TERMINATED, RUNNING, RUNNING, RUNNING]


def test_only_what_is_requested_is_sent(count: EnvServer) -> None:
    with DmStream(count.address) as stream:
        stream.join(stream.create())

        assert stream.step(names=[])[1] == {}
        assert set(stream.step(names=["reward", "reward"])[1]) == {"reward"}
        assert "observation 99" in stream.refused(step={"requested_observations": [99]}).message


def test_seeds_and_options_of_create_and_reset(count: EnvServer) -> None:
    def first(stream: DmStream) -> float:
        return float(stream.step(names=["observation"])[1]["observation"][0])

    with DmStream(count.address) as stream:
        stream.join(stream.create(seed=5))
        drawn = first(stream)
        assert first(stream) == drawn  # the second step, not another episode
        stream.ask(reset={})
        assert first(stream) != drawn
        for seed in (5, 5.0, "5"):
            stream.ask(reset={"settings": tensors({"seed": seed})})
            assert first(stream) == drawn
        stream.ask(reset={"settings": tensors({"options.deep.draw": 77})})
        assert first(stream) == 77
        stream.ask(reset={})
        assert first(stream) != 77

    with DmStream(count.address) as stream:
        stream.join(stream.create(args="{}", **{"options.deep.draw": 8}))
        assert first(stream) == 8
        stream.ask(reset={})
        assert first(stream) == 8


def test_what_stands_for_actions_that_are_not_sent(count: EnvServer) -> None:
    def shown(stream: DmStream, actions: dict[int, Any]) -> float:
        return float(stream.step(actions, ["observation"])[1]["observation"][2])

    with DmStream(count.address) as stream:
        stream.join(stream.create())
        uids = {spec.name: uid for uid, spec in stream.specs.actions.items()}
        x, n = uids["x"], uids["n"]
        pull = np.array([1, 1], np.float32)
        stream.step()
        assert shown(stream, {x: pull, n: 3}) == 5
        assert shown(stream, {n: 1}) == 3
        assert shown(stream, {}) == 3
        stream.step()
        assert shown(stream, {n: 1}) == 1  # what was held ends with its sequence

    with DmStream(count.address) as stream:
        stream.join(stream.create(missing_actions="default"))
        stream.step()
        assert shown(stream, {x: pull, n: 3}) == 5
        assert shown(stream, {n: 1}) == 1

    with DmStream(count.address) as stream:
        stream.join(stream.create(missing_actions="error"))
        stream.step()
        refusal = stream.refused(**stream.step_request({n: 1}))
        assert "['x'] are missing" in refusal.message
        assert shown(stream, {x: pull, n: 3}) == 5


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1, 9]), shape=[2]), "9.0 is above 5.0"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1, -9]), shape=[2]), "(element [1])"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[np.nan]), shape=[2]), "holds NaN"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1, 2, 3]), shape=[3]), "shape [3]"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1, 2, 3]), shape=[2]), "3 elements"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1]), shape=[2, 1]), "shape [2, 1]"),
        ("x", pb.Tensor(floats=pb.Tensor.FloatArray(array=[1]), shape=[-1]), "shape [1]"),
        ("x", pb.Tensor(doubles=pb.Tensor.DoubleArray(array=[1]), shape=[2]), "is DOUBLE"),
        ("x", pb.Tensor(shape=[2]), "without a payload"),
        ("n", pb.Tensor(int64s=pb.Tensor.Int64Array(array=[4])), "4 is above 3"),
        ("n", pb.Tensor(int64s=pb.Tensor.Int64Array(array=[])), "0 elements"),
    ],
)
def test_a_wrong_action_is_refused_by_name_and_nothing_happens(
    count: EnvServer, name: str, tensor: Any, message: str
) -> None:
    with DmStream(count.address) as stream:
        stream.join(stream.create())
        uids = {spec.name: uid for uid, spec in stream.specs.actions.items()}
        stream.step()

        refusal = stream.refused(step={"actions": {uids[name]: tensor}})

        assert refusal.code == 3
        assert f"action '{name}'" in refusal.message
        assert message in refusal.message
        assert stream.step(names=["observation"])[1]["observation"][1] == 1


def test_actions_are_not_read_from_the_step_that_begins_a_sequence(count: EnvServer) -> None:
    malformed = {99: pb.Tensor(shape=[-9])}
    with DmStream(count.address) as stream:
        stream.join(stream.create())
        stream.send(step={"actions": malformed, "requested_observations": [1, 1]})
        assert stream.stepped(stream.receive())[0] == RUNNING
        assert stream.refused(step={"actions": malformed}).code == 3


def test_broadcast_and_inferred_axes_are_understood(count: EnvServer) -> None:
    with DmStream(count.address) as stream:
        stream.join(stream.create())
        x = next(uid for uid, spec in stream.specs.actions.items() if spec.name == "x")
        stream.step()
        for array, shape in (([2.0], [2]), ([2.0, 2.0], [-1])):
            tensor = pb.Tensor(floats=pb.Tensor.FloatArray(array=array), shape=shape)
            stream.send(step={"actions": {x: tensor}, "requested_observations": [1]})
            _, shown = stream.stepped(stream.receive())
            assert shown["observation"][2] == 4


# --- malformed requests, states ----------------------------------------------------------


def test_malformed_requests_are_answered_and_the_stream_goes_on(count: EnvServer) -> None:
    unknown = any_pb2.Any()
    unknown.Pack(duration_pb2.Duration())
    with DmStream(count.address) as stream:
        for data in (b"\xff\xff", b"", b"\x0a", b"\xf8\x07\x01"):
            stream.send_raw(data)
            assert stream.receive().error.code == 3
        assert stream.refused(extension=unknown).code == 12
        assert stream.refused(step={}).code == 9
        assert stream.refused(reset={}).code == 9
        assert stream.refused(join_world={"world_name": "nowhere"}).code == 5
        assert stream.refused(reset_world={"world_name": "nowhere"}).code == 5
        assert stream.refused(destroy_world={"world_name": ""}).code == 5
        assert stream.refused(create_world={"settings": tensors({"levelName": 1})}).code == 3
        broken = pb.Tensor(floats=pb.Tensor.FloatArray(array=[1, 2]), shape=[3])
        assert stream.refused(create_world={"settings": {"seed": broken}}).code == 3
        assert stream.ask(leave_world={}).WhichOneof("payload") == "leave_world"

        stream.join(stream.create())
        assert stream.refused(join_world={}).code == 9
        assert stream.step()[0] == RUNNING


def test_a_world_is_not_destroyed_under_its_agents(count: EnvServer) -> None:
    with DmStream(count.address) as stream, DmStream(count.address) as other:
        name = stream.create()
        stream.join(name)

        assert stream.refused(destroy_world={"world_name": name}).code == 9
        assert other.refused(destroy_world={"world_name": name}).code == 9
        stream.ask(leave_world={})
        assert other.ask(destroy_world={"world_name": name}).HasField("destroy_world")
        assert stream.refused(join_world={"world_name": name}).code == 5


@pytest.mark.slow
def test_a_full_world_and_a_full_endpoint_say_so() -> None:
    with (
        EnvServer(Count, max_sessions=1) as server,
        DmStream(server.address) as stream,
        DmStream(server.address) as other,
    ):
        name = stream.create()
        stream.join(name)

        assert other.refused(join_world={"world_name": name}).code == 8
        assert other.refused(create_world={}).code == 8
        with RemoteEnv(server.address) as remote, pytest.raises(CapacityError):
            remote.reset()


def test_without_a_name_everyone_joins_a_world_of_their_own(count: EnvServer) -> None:
    assert settled(count, 0)
    with DmStream(count.address) as stream, DmStream(count.address) as other:
        stream.join()
        other.join()
        assert count.num_sessions == 2
        assert stream.step()[0] == other.step()[0] == RUNNING
        assert stream.ask(reset_world={}).HasField("reset_world")
        stream.ask(leave_world={})
        assert settled(count, 1)


@pytest.mark.slow
def test_a_token_is_asked_for() -> None:
    with EnvServer(Count, token="secret") as server:
        with DmStream(server.address, "secret") as stream:
            stream.create()
        with DmStream(server.address) as stream, pytest.raises(grpc.RpcError) as caught:
            stream.create()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


# --- failures ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fault",
    [
        Fault.RAISE,
        pytest.param(Fault.EXIT, marks=pytest.mark.slow),
        pytest.param(Fault.NAN, marks=pytest.mark.slow),
    ],
)
def test_an_environment_that_fails_is_reported_and_replaced(fault: Fault) -> None:
    with EnvServer(lambda: FaultyEnv(fault, 2)) as server, DmStream(server.address) as stream:
        stream.join(stream.create())
        stream.step()
        state, shown = stream.step({ACTION: 1})

        refusal = stream.refused(**stream.step_request({ACTION: 1}))

        assert refusal.code == 13
        if fault is Fault.RAISE:
            detail = error_details_pb2.DebugInfo()
            assert refusal.details[0].Unpack(detail)
            assert "the environment\nis broken" in detail.detail
        # The sequence has ended; what was seen last is shown once more.
        last_state, last = stream.step({ACTION: 1})
        assert (last_state, last["reward"]) == (INTERRUPTED, 0.0)
        assert last["observation"] == shown["observation"]
        state, shown = stream.step({ACTION: 1})
        assert (state, shown["observation"]) == (RUNNING, 0.0)


@pytest.mark.slow
def test_a_step_that_takes_too_long_is_answered_at_its_deadline() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.HANG), _step_grace_s=0) as server,
        DmStream(server.address) as stream,
    ):
        stream.join(stream.create(timeout_s=0.3))
        while stream.ask(**stream.step_request()).WhichOneof("payload") == "error":
            pass  # the process took longer to start

        assert stream.refused(**stream.step_request()).code == 4
        assert stream.step()[0] == INTERRUPTED


def test_a_failed_beginning_is_refused_and_tried_again() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.RAISE, 0)) as server,
        DmStream(server.address) as stream,
    ):
        stream.join(stream.create())
        for _ in range(2):
            assert stream.refused(**stream.step_request()).code == 13


def test_the_worlds_of_a_client_that_vanishes_end(count: EnvServer) -> None:
    assert settled(count, 0)
    stream, other = DmStream(count.address), DmStream(count.address)
    name = stream.create()
    other.join(name).step()

    stream.close()
    assert other.step()[0] == RUNNING  # another agent still needs it
    other.send(**other.step_request())
    other.close()

    assert settled(count, 0)


@pytest.mark.slow
def test_a_world_outlives_an_agent_that_vanishes_in_the_middle_of_a_step() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.HANG), _step_grace_s=0) as server,
        DmStream(server.address) as creator,
    ):
        name = creator.create()
        agent = DmStream(server.address).join(name)
        agent.step()
        agent.send(**agent.step_request())
        agent.close()

        while creator.ask(join_world={"world_name": name}).WhichOneof("payload") == "error":
            pass
        assert creator.ask(step={}).step.state == RUNNING


def test_every_frame_is_answered_and_the_stream_goes_on(count: EnvServer) -> None:
    chance = random.Random(4)
    with DmStream(count.address) as stream:
        name = stream.create()
        stream.join(name)
        frames = [
            pb.EnvironmentRequest(**payload).SerializeToString()
            for payload in (
                stream.step_request({1: np.ones(2, np.float32), 2: 1}),
                {"reset": {"settings": tensors({"seed": 3, "options.deep.draw": 1})}},
                {"create_world": {"settings": tensors({"args": '{"seed": 1}'})}},
                {"join_world": {"world_name": name, "settings": tensors({"lane": 0})}},
            )
        ]
        frames.append(_core(8, b"\x0a\x06rlmesh"))
        frames.append(_core(9, frames[1][2:]))
        for number in range(300):
            frame = bytearray(chance.choice(frames))
            for _ in range(chance.randint(1, 3)):
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            del frame[len(frame) - chance.choice((0, 0, 0, 1, 7)) :]
            # What ends the world or the membership is not the point.
            kind = pb_kind(bytes(frame))
            if kind not in ("leave_world", "create_world") or number % 50 == 0:
                stream.send_raw(bytes(frame))
                assert stream.receive_raw()


def pb_kind(frame: bytes) -> str | None:
    try:
        kind: str | None = pb.EnvironmentRequest.FromString(frame).WhichOneof("payload")
    except DecodeError:
        return None
    return kind


@pytest.mark.slow
def test_a_draining_endpoint_admits_no_session_and_waits_for_the_open_ones() -> None:
    with EnvServer(Count) as server, DmStream(server.address) as stream:
        stream.join(stream.create())

        assert not server.drain(0.1)
        assert stream.step()[0] == RUNNING
        with DmStream(server.address) as other, pytest.raises(grpc.RpcError) as caught:
            other.create()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        stream.finish()
        assert stream.rest() == []
        assert server.drain(20.0)


def ended(stream: DmStream) -> None:
    """Send nothing more, and wait until the endpoint has ended the stream."""
    stream.finish()
    assert stream.rest() == []


@pytest.mark.parametrize("how", ["finishes", "vanishes"])
def test_worlds_that_no_agent_has_joined_end_with_their_stream(count: EnvServer, how: str) -> None:
    assert eventually(lambda: count.num_sessions == 0)
    streams = [DmStream(count.address) for _ in range(DEFAULT_MAX_SESSIONS)]
    names = [stream.create() for stream in streams]
    with DmStream(count.address) as other:
        assert other.refused(create_world={}).code == 8

        for stream in streams:
            if how == "finishes":
                ended(stream)
            stream.close()

        if how == "vanishes":
            assert eventually(lambda: count.num_sessions == 0)
        assert count.num_sessions == 0
        assert other.refused(join_world={"world_name": names[0]}).code == 5
        assert other.join(other.create()).step()[0] == RUNNING


def test_a_world_ends_with_its_stream_also_when_an_agent_was_refused(count: EnvServer) -> None:
    assert eventually(lambda: count.num_sessions == 0)
    creator = DmStream(count.address)
    name = creator.create()
    with DmStream(count.address) as agent:
        wrong = {"world_name": name, "settings": tensors({"lane": 7})}
        assert agent.refused(join_world=wrong).code == 3

        ended(creator)

        assert agent.refused(join_world={"world_name": name}).code == 5
        assert count.num_sessions == 0
    creator.close()


def test_a_world_with_agents_outlives_its_creator_and_ends_with_the_last_of_them(
    pair: EnvServer,
) -> None:
    assert eventually(lambda: pair.num_sessions == 0)
    creator = DmStream(pair.address)
    name = creator.create()
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        first.join(name, lane=0)

        ended(creator)

        assert first.step()[0] == RUNNING
        second.join(name, lane=1)
        first.ask(leave_world={})
        assert second.step()[0] == RUNNING
        second.ask(leave_world={})
        assert first.refused(join_world={"world_name": name}).code == 5
        assert eventually(lambda: pair.num_sessions == 0)
    creator.close()


def test_a_world_whose_agents_have_left_stays_while_its_creator_is_there(pair: EnvServer) -> None:
    with DmStream(pair.address) as creator:
        name = creator.create(min_agents=2)
        agents = [DmStream(pair.address).join(name) for _ in range(2)]
        for agent in agents:
            agent.send(**agent.step_request())
        # Before one has left: the episode of the other would wait for a second agent again.
        assert [agent.stepped(agent.receive())[0] for agent in agents] == [RUNNING] * 2
        for agent in agents:
            ended(agent)
            agent.close()

        assert creator.ask(reset_world={"world_name": name}).HasField("reset_world")
        assert creator.join(name).specs.observations


# --- several lanes and agents ------------------------------------------------------------


def test_lanes_step_together(pair: EnvServer) -> None:
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        name = first.create(seed=3)
        first.join(name, lane=1)
        second.join(name)
        vector: Any = SyncVectorEnv([endless, endless])
        observations, _ = vector.reset(seed=3)
        shown = [stream.step()[1]["observation"] for stream in (second, first)]
        assert np.array_equal(shown, observations)

        first.send(**first.step_request())
        second.send(**second.step_request({1: 2}))
        shown = [stream.stepped(stream.receive())[1] for stream in (second, first)]
        assert [each["observation"][1:].tolist() for each in shown] == [[1, 2], [1, 0]]


def disabled_vector() -> Any:
    return SyncVectorEnv([Count] * 2, autoreset_mode=AutoresetMode.DISABLED)


@pytest.mark.parametrize(
    "serve",
    [
        lambda: EnvServer(Count, num_envs=2),
        pytest.param(lambda: EnvServer(lambda: SyncVectorEnv([Count] * 2)), marks=pytest.mark.slow),
        pytest.param(lambda: EnvServer(disabled_vector), marks=pytest.mark.slow),
    ],
    ids=["ours", "next-step", "disabled"],
)
def test_lanes_that_end_go_on_as_gymnasium_has_it(serve: Callable[[], EnvServer]) -> None:
    with (
        serve() as server,
        DmStream(server.address) as first,
        DmStream(server.address) as second,
    ):
        name = first.create(seed=3)
        streams = [stream.join(name) for stream in (first, second)]
        vector: Any = SyncVectorEnv([Count] * 2)
        observations, _ = vector.reset(seed=3)
        rewards, ended = np.zeros(2), np.zeros(2, bool)
        for number in range(12):
            for stream in streams:
                stream.send(**stream.step_request({1: number % 4}))
            answers = [stream.stepped(stream.receive()) for stream in streams]
            shown = [each["observation"].tolist() for _, each in answers]
            assert shown == observations.tolist(), number
            assert [each["reward"] for _, each in answers] == rewards.tolist()
            assert [state for state, _ in answers] == [TERMINATED if e else RUNNING for e in ended]
            actions = {"x": np.zeros((2, 2), np.float32), "n": np.full(2, (number + 1) % 4)}
            observations, rewards, ended, _, _ = vector.step(actions)


@pytest.mark.slow
def test_a_mode_that_the_protocol_has_no_form_for_is_refused() -> None:
    def vector() -> Any:
        return SyncVectorEnv([Count] * 2, autoreset_mode=AutoresetMode.SAME_STEP)

    with EnvServer(vector) as server, DmStream(server.address) as stream:
        assert stream.refused(create_world={}).code == 12
    with EnvServer(disabled_vector) as server, DmStream(server.address) as stream:
        batched = {"world_name": stream.create(), "settings": tensors({"batched": True})}
        assert stream.refused(join_world=batched).code == 12


@pytest.mark.parametrize("how", ["leaves", "vanishes"])
def test_who_goes_in_the_middle_of_a_lockstep_frees_the_others(pair: EnvServer, how: str) -> None:
    with DmStream(pair.address) as first:
        name = first.create()
        second = DmStream(pair.address).join(name)
        first.join(name)
        for stream in (first, second):
            stream.step()
        first.send(**first.step_request())

        if how == "leaves":
            second.ask(leave_world={})
        second.close()

        assert first.stepped(first.receive())[0] == RUNNING
        assert first.step()[0] == RUNNING


def test_a_world_reset_waits_until_all_have_heard(pair: EnvServer) -> None:
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        name = first.create()
        first.join(name)
        second.join(name)
        for stream in (first, second):
            stream.step()

        first.send(reset_world={"world_name": name, "settings": tensors({"seed": 4})})
        first.send(**first.step_request())
        assert second.step()[0] == INTERRUPTED

        assert first.receive().HasField("reset_world")
        drawn = [first.stepped(first.receive())[1], second.step()[1]]
        vector: Any = SyncVectorEnv([endless, endless])
        expected, _ = vector.reset(seed=4)
        assert [each["observation"][0] for each in drawn] == expected[:, 0].tolist()


@pytest.mark.slow
def test_a_world_reset_reaches_an_agent_whose_step_waits_for_the_reset_of_another_lane(
    tmp_path: Path,
) -> None:
    begun = tmp_path / "begun"

    def vector() -> Any:
        slow_to_reset = [lambda: Count(), lambda: SlowReset(2, begun)]
        return SyncVectorEnv(slow_to_reset, autoreset_mode=AutoresetMode.DISABLED)

    with (
        EnvServer(vector) as server,
        DmStream(server.address) as agent,
        DmStream(server.address) as other,
    ):
        name = agent.create()
        agent.join(name, lane=0)
        for _ in range(3):
            agent.step()
        # Lane 1 has ended: it is reset before the next step.
        agent.send(**agent.step_request())
        assert eventually(begun.exists)
        assert other.ask(reset_world={"world_name": name}).HasField("reset_world")

        assert agent.stepped(agent.receive())[0] == INTERRUPTED
        assert agent.step()[0] == RUNNING


def test_a_world_reset_does_not_wait_for_ever(pair: EnvServer) -> None:
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        name = first.create(reset_world_timeout_s=0.1)
        second.join(name).step()

        assert first.refused(reset_world={"world_name": name}).code == 4
        assert second.step()[0] == INTERRUPTED
        assert first.ask(reset_world={"world_name": name}).HasField("reset_world")


def test_agents_play_one_game(duel: EnvServer) -> None:
    with DmStream(duel.address) as a, DmStream(duel.address) as b:
        name = a.create(min_agents=2)
        a.join(name, agent="a")
        a.send(**a.step_request())
        b.join(name)
        b.send(**b.step_request())
        for stream in (a, b):
            state, shown = stream.stepped(stream.receive())
            assert (state, shown["reward"], shown["present"]) == (RUNNING, 0.0, True)

        ended = []
        for count in range(1, 3):
            a.send(**a.step_request({ACTION: 1}))
            b.send(**b.step_request({ACTION: 2}))
            answers = [stream.stepped(stream.receive()) for stream in (a, b)]
            assert [shown["observation"][0] for _, shown in answers] == [3, 3], count
            assert [shown["reward"] for _, shown in answers] == [1, 2]
            ended.append([state for state, _ in answers])
        assert ended == [[RUNNING, RUNNING], [TERMINATED, RUNNING]]

        # a's next sequence begins when b's has ended, too.
        a.send(**a.step_request())
        assert b.step({ACTION: 4})[0] == RUNNING
        assert b.step({ACTION: 4})[0] == TERMINATED
        b.send(**b.step_request())
        assert [stream.stepped(stream.receive())[0] for stream in (a, b)] == [RUNNING, RUNNING]


@pytest.mark.slow
def test_games_side_by_side_go_on_together() -> None:
    with EnvServer(Duel, num_envs=2) as server, DmStream(server.address) as creator:
        name = creator.create(min_agents=4)
        streams = [DmStream(server.address) for _ in range(4)]
        for number, stream in enumerate(streams):
            stream.join(name, lane=number // 2, agent="ab"[number % 2])
            stream.send(**stream.step_request())
        assert [stream.stepped(stream.receive())[0] for stream in streams] == [RUNNING] * 4
        for number, stream in enumerate(streams):
            stream.send(**stream.step_request({ACTION: number}))
        shown = [stream.stepped(stream.receive())[1] for stream in streams]
        assert [each["observation"][0] for each in shown] == [1, 1, 5, 5]
        assert [each["reward"] for each in shown] == [0, 1, 2, 3]
        for stream in streams:
            stream.close()


@pytest.mark.slow
def test_several_agents_can_be_driven_by_one_batched_join(duel: EnvServer) -> None:
    with DmStream(duel.address) as stream:
        stream.join(stream.create(), batched=True)
        names = {spec.name for spec in stream.specs.observations.values()}
        assert {"observations.a", "observations.b", "%70resent", "rewards", "reward"} <= names
        stream.step()
        _, shown = stream.step({1: np.array([2]), 2: np.array([3])})
        assert shown["observations.a"].tolist() == [[5.0]]
        assert shown["rewards"].tolist() == [[2.0, 3.0]]


def test_agents_meet_in_a_world_without_a_name(duel: EnvServer) -> None:
    with DmStream(duel.address) as a, DmStream(duel.address) as b:
        a.join("", agent="b")
        b.join("")
        taken = b.refused(join_world={})
        assert taken.code == 9
        assert settled(duel, 1)  # the test before may just be leaving


def test_a_batched_join_drives_all_lanes() -> None:
    with EnvServer(Count, num_envs=3) as server, DmStream(server.address) as stream:
        name = stream.create(seed=9)
        stream.join(name, batched=True)
        uids = {spec.name: uid for uid, spec in stream.specs.actions.items()}
        vector: Any = SyncVectorEnv([Count] * 3)
        observations, _ = vector.reset(seed=9)
        state, shown = stream.step()
        rng = np.random.default_rng(0)
        for _ in range(20):
            assert state == RUNNING
            assert shown["observation"].tobytes() == observations.tobytes()
            actions = {
                "x": rng.uniform(-5, 5, (3, 2)).astype(np.float32),
                "n": rng.integers(4, size=3),
            }
            state, shown = stream.step({uids[key]: value for key, value in actions.items()})
            observations, rewards, terminated, truncated, _ = vector.step(actions)
            assert shown["reward"].tolist() == rewards.tolist()
            assert shown["terminated"].tolist() == terminated.tolist()
            assert shown["truncated"].tolist() == truncated.tolist()
        with DmStream(server.address) as other:
            assert other.refused(join_world={"world_name": name}).code == 8

        stream.ask(reset={"settings": tensors({"seed": np.array([1, 1, 1])})})
        assert len(set(stream.step()[1]["observation"][:, 0])) == 1
        stream.ask(leave_world={})
        stream.join(name)
        assert stream.step()[0] == RUNNING


def test_one_batched_lane_begins_its_next_episode_by_itself(count: EnvServer) -> None:
    with DmStream(count.address) as stream:
        stream.join(stream.create(), batched=True)
        counts = [int(stream.step()[1]["observation"][0, 1]) for _ in range(6)]
        assert counts == [0, 1, 2, 3, 0, 1]


# --- properties --------------------------------------------------------------------------


def test_the_contract_can_be_read_before_and_after_joining(count: EnvServer) -> None:
    with connection.Connection(plain_channel(count.address)) as link:
        extension = properties.PropertiesExtension(link)
        assert contract_from_text(str(extension[CONTRACT])) == count.contract
        dm_env_adaptor.create_and_join_world(link, {}, {})
        assert contract_from_text(str(extension[CONTRACT])) == count.contract


def test_properties_as_the_extension_has_them(count: EnvServer) -> None:
    with connection.Connection(plain_channel(count.address)) as link:
        extension = properties.PropertiesExtension(link)
        assert [spec.listable for spec in extension.specs().values()] == [True]
        assert set(extension.specs("rlmesh")) == {CONTRACT, "rlmesh.version"}
        with pytest.raises(KeyError):
            extension["rlmesh.world.seed"]
        env, name = dm_env_adaptor.create_and_join_world(link, {}, {})
        assert extension["rlmesh.world.name"] == name
        specs = extension.specs("rlmesh.world")
        assert specs["rlmesh.world.seed"].writable
        assert not specs["rlmesh.world.seed"].readable
        with pytest.raises(PermissionError):
            extension["rlmesh.world.seed"]
        with pytest.raises(PermissionError):
            extension["rlmesh.version"] = "2"
        with pytest.raises(ValueError, match="Property value error"):
            extension["rlmesh.world.seed"] = -1
        with pytest.raises(PermissionError):
            extension["rlmesh.world.missing_actions"] = "default"
        with pytest.raises(KeyError):
            extension.list("rlmesh.nothing")
        assert extension["rlmesh.world.missing_actions"] == "hold"
        drawn = []
        for _ in range(2):
            extension["rlmesh.world.seed"] = 11
            drawn.append(env.reset().observation["observation"][0])
        assert drawn[0] == drawn[1]


def _core(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2, len(data)]) + data


def test_properties_as_the_specification_has_them(count: EnvServer) -> None:
    def ask(stream: DmStream, number: int, message: Any) -> bytes:
        stream.send_raw(_core(number, message.SerializeToString()))
        return stream.receive_raw()

    def keys(*names: str) -> Any:
        return pb.Tensor.StringArray(array=names)

    with DmStream(count.address) as stream:
        stream.join(stream.create(missing_actions="error"))
        read = ask(stream, 8, keys("rlmesh.version", "rlmesh.world.missing_actions"))
        assert read[0] == 8 << 3 | 2
        values = pb.CreateWorldRequest.FromString(read[2:]).settings
        assert set(values) == {"rlmesh.version", "rlmesh.world.missing_actions"}

        written = pb.CreateWorldRequest(settings=tensors({"rlmesh.world.seed": 11}))
        assert ask(stream, 9, written) == bytes([9 << 3 | 2, 0])
        assert b"error" in ask(stream, 8, keys("rlmesh.world.missing_actions"))

        listed = ask(stream, 10, keys("", "rlmesh.world"))
        assert listed[0] == 10 << 3 | 2
        assert all(name in listed for name in (b"rlmesh.world.seed", b"rlmesh.world.name"))
        assert b"rlmesh.contract" not in listed
        missing = ask(stream, 8, keys("rlmesh.version", "nothing"))
        assert pb.EnvironmentResponse.FromString(missing).error.code == 5


def test_a_tensor_of_one_element_cannot_stand_for_a_giant_setting(count: EnvServer) -> None:
    giant = pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0]), shape=[10**5, 10**5])
    with DmStream(count.address) as stream:
        refusal = stream.refused(create_world={"settings": {"options.x": giant}})
        assert "1048576 in all" in refusal.message
        assert tensor_utils.unpack_tensor(pb.Tensor(int8s={"array": b"\1"})) == 1
