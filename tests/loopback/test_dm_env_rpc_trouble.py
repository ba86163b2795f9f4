"""The endpoint as a dm_env_rpc server when clients vanish and environments fail in its worlds."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from dm_env_rpc.v1 import dm_env_rpc_pb2 as pb
from gymnasium import spaces

from rlmesh_ray import EnvServer
from rlmesh_ray.testing.envs import Fault, FaultyEnv
from tests.loopback.dm_env_rpc_stream import INTERRUPTED, RUNNING, DmStream, tensors
from tests.loopback.eventually import eventually

ACTION = 1  # uids count from 1
FOR_EVER = 1000


class Patient(gymnasium.Env[Any, Any]):
    """Shows its process and its steps; takes as many tenths of a second as its action says.

    Args:
        begun: A file that gets a byte when something that takes time has begun.
    """

    observation_space = spaces.Box(0.0, 1e9, (2,), np.float64)
    action_space = spaces.Discrete(FOR_EVER + 1)

    def __init__(self, begun: Path) -> None:
        self._begun = begun

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        self._steps = 0
        self._take((options or {}).get("tenths", 0))
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._take(int(action))
        return self._shown(), 0.0, False, False, {}

    def _take(self, tenths: int) -> None:
        if tenths:
            with self._begun.open("a") as file:
                file.write("x")
            time.sleep(tenths / 10)

    def _shown(self) -> Any:
        return np.array([os.getpid(), self._steps], np.float64)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trouble") / "begun"


@pytest.fixture(scope="module")
def pair(begun: Path) -> Iterator[EnvServer]:
    begun.touch()
    with EnvServer(lambda: Patient(begun), num_envs=2, _step_grace_s=0) as server:
        yield server


def both_begun(first: DmStream, second: DmStream) -> int:
    """Have both joined to a new world, and past their first steps; return the worker's id."""
    name = first.create()
    first.join(name, lane=0)
    second.join(name, lane=1)
    second.step()
    return int(first.step()[1]["observation"][0])


def taken(server: EnvServer, num_sessions: int) -> bool:
    """Wait until that many places are taken, as long as that may take."""
    return eventually(lambda: server.num_sessions == num_sessions)


def test_a_worker_that_dies_between_steps_ends_the_sequences_of_all_lanes(pair: EnvServer) -> None:
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        process = both_begun(first, second)
        second.ask(reset={})

        os.kill(process, signal.SIGKILL)
        # The lane that begins anew is the first to notice.
        while second.ask(**second.step_request()).WhichOneof("payload") != "error":
            second.ask(reset={})

        state, shown = first.step()
        assert (state, shown["observation"][0]) == (INTERRUPTED, process)
        state, shown = first.step()
        assert (state, shown["observation"][1]) == (RUNNING, 0)
        assert shown["observation"][0] != process


def test_a_client_that_vanishes_in_its_own_step_ends_no_other_session(
    pair: EnvServer, begun: Path
) -> None:
    before = begun.read_text()
    with DmStream(pair.address) as creator, DmStream(pair.address) as other:
        name = creator.create()
        agent = DmStream(pair.address).join(name, lane=0)
        agent.step()
        agent.send(**agent.step_request({ACTION: FOR_EVER}))
        assert eventually(lambda: begun.read_text() > before)
        other.join(name, lane=1)
        other.send(**other.step_request())
        time.sleep(0.2)  # nothing tells when it is there; what comes later is served as well

        agent.close()

        assert other.stepped(other.receive())[0] == RUNNING
        assert other.step()[0] == RUNNING


def test_a_step_that_is_not_awaited_any_more_is_given_up(pair: EnvServer, begun: Path) -> None:
    before = begun.read_text()
    with DmStream(pair.address) as creator:
        name = creator.create()
        agents = [DmStream(pair.address).join(name) for _ in range(2)]
        for agent in agents:
            agent.step()
        for agent in agents:
            agent.send(**agent.step_request({ACTION: FOR_EVER}))
        assert eventually(lambda: begun.read_text() > before)

        for agent in agents:
            agent.close()

        while creator.ask(join_world={"world_name": name}).WhichOneof("payload") == "error":
            pass
        assert creator.ask(step={}).step.state == RUNNING


def test_an_answer_that_is_there_does_not_wait_for_what_another_agent_wants(
    pair: EnvServer, begun: Path
) -> None:
    before = begun.read_text()
    with DmStream(pair.address) as first, DmStream(pair.address) as second:
        name = first.create()
        first.join(name, lane=0).step()
        first.send(**first.step_request({ACTION: 10}))
        assert eventually(lambda: begun.read_text() > before)
        second.join(name, lane=1)
        second.ask(reset={"settings": tensors({"options.tenths": FOR_EVER})})
        second.send(**second.step_request())

        assert first.stepped(first.receive())[0] == RUNNING


def test_without_a_name_no_other_stream_joins_a_world_that_a_stream_has_created() -> None:
    class Pair:
        """Two agents."""

        possible_agents = ("a", "b")
        observation_spaces: ClassVar[Any] = dict.fromkeys("ab", spaces.Discrete(2))
        action_spaces: ClassVar[Any] = observation_spaces

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
            return dict.fromkeys("ab", 0), {}

        def step(self, actions: Any, /) -> tuple[Any, ...]:
            no = {"__all__": False}
            return dict.fromkeys("ab", 0), dict.fromkeys("ab", 0.0), no, no, {}

        def close(self) -> None:
            """Nothing to do."""

    with (
        EnvServer(Pair, max_sessions=4) as server,
        DmStream(server.address) as invited,
        DmStream(server.address) as stranger,
    ):
        with DmStream(server.address) as matchmaker:
            name = matchmaker.create()
            invited.join(name, agent="a")
        assert taken(server, 1)
        time.sleep(0.1)  # nothing tells that the matchmaker's end has been seen

        stranger.join("")

        assert server.num_sessions == 2
        with DmStream(server.address) as other:
            other.join(name, agent="b")


def test_some_lanes_of_a_batch_begin_anew(pair: EnvServer) -> None:
    def lanes(*numbers: int) -> dict[str, Any]:
        return {"settings": tensors({"lanes": np.array(numbers)})}

    with DmStream(pair.address) as stream:
        name = stream.create()
        stream.join(name, batched=True)
        stream.step()
        stream.step()

        stream.ask(reset=lanes(1))
        assert stream.step()[1]["observation"][:, 1].tolist() == [1, 0]

        assert "the last lane is 1" in stream.refused(reset=lanes(2)).message
        assert "no reset setting 'lanes'" in stream.refused(reset_world=lanes(1)).message
        assert stream.step()[1]["observation"][:, 1].tolist() == [2, 1]
        stream.ask(leave_world={})
        stream.join(name)
        assert "no reset setting 'lanes'" in stream.refused(reset=lanes(0)).message


def test_many_small_tensors_cannot_stand_for_giant_settings(pair: EnvServer) -> None:
    large = pb.Tensor(floats=pb.Tensor.FloatArray(array=[1.0]), shape=[2**16])
    with DmStream(pair.address) as stream:
        settings = {f"options.{number}": large for number in range(17)}
        assert "1048576 in all" in stream.refused(create_world={"settings": settings}).message


@pytest.mark.slow
def test_an_environment_that_hangs_when_it_begins_is_left_to_itself() -> None:
    with (
        EnvServer(lambda: FaultyEnv(Fault.HANG, 0), max_sessions=2, _step_grace_s=0) as server,
        DmStream(server.address) as other,
    ):
        agent = DmStream(server.address).join()
        agent.send(**agent.step_request())
        other.create()
        agent.close()
        assert taken(server, 1)
