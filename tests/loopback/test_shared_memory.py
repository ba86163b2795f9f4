"""Steps through shared memory keep every rule that steps as messages keep."""

import contextlib
import dataclasses
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rlmesh_ray import EnvServer, RemoteEnv
from rlmesh_ray.client import env_client
from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.env_client import EnvClient, ResetResult, StepResult, shake_hands
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointError,
    RemoteEnvError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import Close
from rlmesh_ray.server import session_worker
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault, FaultyEnv
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport import broker, door
from rlmesh_ray.transport import shared_memory as wire
from rlmesh_ray.transport.direct_client import DirectClient
from rlmesh_ray.transport.lent_road import LentRoad
from rlmesh_ray.wire.rlmesh_v1 import env as env_wire
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Gated, Lifelike

NOTHING = [np.zeros(1, np.int64)]


@contextlib.contextmanager
def served(env: Any, *, step_timeout_s: float = 30.0, **options: Any) -> Iterator[EnvClient]:
    """Yield a session whose lanes have been reset, and which has a road."""
    with EnvServer(env, **options) as server, session(server, step_timeout_s) as client:
        yield client


@contextlib.contextmanager
def session(server: EnvServer, step_timeout_s: float = 30.0) -> Iterator[EnvClient]:
    client = EnvClient(
        Dial(server.address), step_timeout_s=step_timeout_s, transport="shared_memory"
    )
    client.reset()
    yield client
    client.close()


def has_road(client: EnvClient) -> bool:
    return client._roads.is_open


def num_messages(client: EnvClient) -> int:
    return client._exchange.num_sent


def array(result: ResetResult | StepResult) -> NDArray[Any]:
    """Return the observations of all lanes."""
    return np.asarray(result.observation[0])


# --- what travels, and how ------------------------------------------------------------------


def test_steps_send_no_messages() -> None:
    with served("CartPole-v1", num_envs=4) as client:
        before = num_messages(client)
        for _ in range(10):
            client.step([np.zeros(4, np.int64)])

        assert num_messages(client) == before
        assert has_road(client)


def test_no_step_takes_the_direct_road_of_a_session_whose_stream_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(env_client, "_STREAM_PERIOD_S", 0.0)
    with served("CartPole-v1", num_envs=4) as client:
        client.step([np.zeros(4, np.int64)])
        assert has_road(client)
        client._stream._call.cancel()

        with pytest.raises(EndpointError, match="the session"):
            client.step([np.zeros(4, np.int64)])

        assert not has_road(client)


def test_who_leaves_before_a_road_is_given_leaves_nothing_to_the_next_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give = LentRoad.give

    def to_nobody(road: LentRoad, to: socket.socket, greeting: bytes) -> None:
        monkeypatch.setattr(LentRoad, "give", give)
        raise BrokenPipeError

    with EnvServer(Lifelike, max_sessions=1) as server:
        monkeypatch.setattr(LentRoad, "give", to_nobody)
        first = EnvClient(Dial(server.address))
        pid: Any = first.reset().infos["pid"]
        assert [array(first.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]
        assert first._roads.name != "shared memory"
        first.close()

        with session(server) as second:
            begun = second.reset()
            again: Any = begun.infos["pid"]
            assert again.tolist() == pid.tolist()
            assert array(begun).item() == 0
            assert [array(second.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]


def test_a_worker_that_was_given_a_road_too_late_goes_on_without_it() -> None:
    with EnvServer(Lifelike, step_grace_s=600.0) as server:
        client = EnvClient(Dial(server.address))
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        os.kill(pid, signal.SIGSTOP)
        assert greet(server, client, timeout_ms=50) == (wire.REFUSED, [])
        os.kill(pid, signal.SIGCONT)

        assert [array(client.step(NOTHING)).item() for _ in range(3)] == [1, 2, 3]
        assert client.reset().infos["pid"] == pid
        client.step(NOTHING)
        assert has_road(client)
        client.close()


def test_thousands_of_lanes_step_directly_as_soon_as_they_are_reset() -> None:
    # What the worker is told of their episodes is more than its socket takes at once.
    with served(functools.partial(Many, 6000)) as client:
        for count in (1, 2):
            assert set(array(client.step([np.zeros(6000, np.int64)])).ravel()) == {count}
        assert has_road(client)


class Many(VectorEnv[Any, Any, Any]):
    """Counts its steps in many lanes."""

    def __init__(self, num_envs: int) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self.num_envs = num_envs
        self.single_observation_space = spaces.Box(0, 1000, (1,), np.float32)
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._count = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._count = 0
        return np.zeros((self.num_envs, 1), np.float32), {}

    def step(self, actions: Any) -> Any:
        self._count += 1
        none = np.zeros(self.num_envs, np.bool_)
        observation = np.full((self.num_envs, 1), self._count, np.float32)
        return observation, np.zeros(self.num_envs), none, none, {}


class SlowToTell(Lifelike):
    """Waits in a call for as long as a file is not there."""

    def wait_for(self, gate: str) -> bool:
        return eventually(Path(gate).exists, 600.0)


def test_after_a_call_that_is_late_no_step_takes_the_direct_road(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with served(SlowToTell, allow_calls=("wait_for",), step_grace_s=600.0) as client:
        client.step(NOTHING)
        assert has_road(client)
        client._timeout_s = 0.5
        with pytest.raises(RemoteEnvError, match="TIMEOUT"):
            client.call("wait_for", str(gate))
        gate.touch()
        client._timeout_s = 30.0

        with pytest.raises(RemoteEnvError, match="a call has not returned in time"):
            client.step(NOTHING)
        client.reset()

        assert array(client.step(NOTHING)).item() == 1


def test_a_request_that_is_refused_after_many_direct_steps_keeps_no_later_one_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_worker, "_MOST_AHEAD", 2)
    with served("CartPole-v1", num_envs=2) as client:
        action = [np.zeros(2, np.int64)]
        for _ in range(8):
            client.step(action)
        assert has_road(client)
        with pytest.raises(RemoteEnvError, match="INVALID"):
            client.reset(lanes=[7])

        client.step(action)
        client.reset()


class Stumbling(Lifelike):
    """Raises at action 1."""

    def step(self, action: Any) -> Any:
        if action:
            raise ValueError("it has stumbled")
        return super().step(action)


@pytest.mark.parametrize("is_cut", [False, True], ids=["raises", "cut"])
def test_a_call_overtakes_no_step_whose_answer_comes_by_the_stream(is_cut: bool) -> None:
    with served(Stumbling, allow_calls=("count",)) as client:
        client.step(NOTHING)
        pending = client.send_step(NOTHING if is_cut else [np.ones(1, np.int64)])
        if is_cut:
            road = client._roads.road()
            assert road is not None
            road._worker.hang_up()

        (count,) = client.call("count")

        if is_cut:
            assert count == 2
            assert array(client.receive_step(pending)).item() == 2
        else:
            with pytest.raises(RemoteEnvError, match="it has stumbled"):
                client.receive_step(pending)


def test_a_call_that_raises_leaves_the_direct_road_open() -> None:
    with served(Lifelike, allow_calls=("nothing",)) as client:
        client.step(NOTHING)
        with pytest.raises(RemoteEnvError, match="nothing"):
            client.call("nothing")
        before = num_messages(client)

        assert [array(client.step(NOTHING)).item() for _ in range(3)] == [2, 3, 4]
        assert num_messages(client) == before


def test_a_road_that_was_lost_is_replaced_but_not_for_ever() -> None:
    with served(Lifelike) as client:
        had_roads = []
        for count in range(1, 6):
            road = client._roads.road()
            had_roads.append(road is not None)
            if road is not None:
                road._worker.hang_up()
            assert array(client.step(NOTHING)).item() == count
        assert had_roads == [True] * 4 + [False]
        client.reset()
        client.step(NOTHING)

        assert has_road(client)


def test_a_client_looks_for_its_answer_and_is_not_held_up_by_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look that waited (it did, for 3 s at most) would have the step miss its deadline here.
    gate = tmp_path / "gate"
    wait = DirectClient.wait

    def open_the_gate(road: DirectClient, timeout_s: float) -> bool:
        gate.touch()
        return wait(road, timeout_s)

    monkeypatch.setattr(DirectClient, "wait", open_the_gate)
    with served(functools.partial(Gated, str(gate)), step_timeout_s=2.5) as client:
        assert array(client.step(NOTHING)).tolist() == [[1.0]]
        assert has_road(client)


def test_what_arrives_is_the_caller_s_own() -> None:
    with served(Lifelike) as client:
        first = client.step(NOTHING)
        kept = first.observation[0].copy(), first.rewards.copy()  # type: ignore[union-attr]
        client.step(NOTHING)

        np.testing.assert_array_equal(first.observation[0], kept[0])
        np.testing.assert_array_equal(first.rewards, kept[1])


def test_episodes_are_accounted_as_they_are_of_messages() -> None:
    def account(transport: str) -> list[Any]:
        client = EnvClient(Dial(server.address), transport=transport)
        ids = [client.reset(seeds=[5, 6]).episode_ids]
        told = []
        for actions in ([0, 0], [1, 0], [0, 0], [0, 1]):
            result = client.step([np.array(actions)])
            told.append(result.completed_episodes)
            ids.append(result.episode_ids)
        ids.append(client.reset(lanes=[0]).episode_ids)
        told.append(client.step([np.array([1, 1])]).completed_episodes)
        client.close()
        known = {own: f"{row}{lane}" for row, one in enumerate(ids) for lane, own in enumerate(one)}
        records = [
            [
                dataclasses.replace(
                    one,
                    episode_id=known[one.episode_id],
                    start_timestamp_ns=0,
                    end_timestamp_ns=0,
                )
                for one in each
            ]
            for each in told
        ]
        return [records, [[bool(own) for own in each] for each in ids]]

    with EnvServer(Lifelike, num_envs=2) as server:
        assert account("shared_memory") == account("tcp") == account("grpc")


def test_spaces_with_text_travel_as_messages() -> None:
    with EnvServer(lambda: EchoEnv(SPACES["text"])) as server:
        assert capabilities.SHARED_MEMORY not in shake_hands(Dial(server.address)).capabilities
        with RemoteEnv(server.address) as env:
            env.reset()
            env.action_space.seed(1)
            env.step(env.action_space.sample())
        with pytest.raises(ConfigurationError, match="offers no shared memory"):
            RemoteEnv(server.address, transport="shared_memory")


def test_who_insists_is_told_when_the_endpoint_gives_none() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(Dial(server.address), transport="shared_memory")
        client._roads._session_id = "0" * 32
        client.reset()
        with pytest.raises(EndpointError, match="has given no shared memory"):
            client.step(NOTHING)
        client.close()


def test_an_operator_can_do_without() -> None:
    with EnvServer(Lifelike, transport="grpc") as server:
        client = EnvClient(Dial(server.address))
        client.reset()
        client.step(NOTHING)
        assert not has_road(client)
        client.close()


def test_a_wrong_action_is_refused_before_it_is_sent() -> None:
    with served("Pendulum-v1", num_envs=2) as client:
        for wrong in (np.zeros((3, 1), np.float32), np.zeros((2, 1)), np.zeros((1, 1), np.float32)):
            with pytest.raises(CodecError, match="expected 2 lanes of float32"):
                client.step([wrong])
        with pytest.raises(CodecError, match="0 columns for 1 leaf"):
            client.step([])
        client.step([np.zeros((2, 1), np.float32)])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="needs a network namespace"
)
def test_who_shares_no_network_with_the_endpoint_gets_messages(tmp_path: Path) -> None:
    program = """
import sys, numpy as np
from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.env_client import EnvClient
from rlmesh_ray.client.join_stream import JoinStream
from rlmesh_ray.transport.direct_client import DirectClient
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.testing.equality import assert_identical
client = EnvClient(Dial(sys.argv[1]))
client.reset()
print(client.step([np.zeros(1, np.int64)]).rewards.tolist(), client._roads.is_open)
client.close()
try:
    EnvClient(Dial(sys.argv[1]), transport="shared_memory")
except ConfigurationError as error:
    print(error)
"""
    with EnvServer(Lifelike, address=f"unix:{tmp_path}/endpoint") as server:
        command = ["unshare", "--net", sys.executable, "-c", program, server.address]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)

    stepped, refused = said.stdout.splitlines()
    assert stepped == "[1.0] False"
    assert "in another container or on another machine" in refused


# --- requests on two roads --------------------------------------------------------------------


def test_a_reset_waits_for_the_step_before_it() -> None:
    with served(Lifelike) as client:
        step = client.send_step(NOTHING)
        reset = client.send_reset()

        assert client.receive_step(step).observation[0] == [1.0]
        assert client.receive_reset(reset).observation[0] == [0.0]
        assert client.step(NOTHING).observation[0] == [1.0]


def test_steps_may_be_sent_ahead() -> None:
    with served(Lifelike) as client:
        sent = [client.send_step(NOTHING) for _ in range(5)]
        counts = [np.ravel(client.receive_step(one).observation[0])[0] for one in sent]

        assert counts == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_call_does_not_overtake_a_step(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        served(lambda: Gated(str(gate)), allow_calls=("count",)) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        step = client.send_step(NOTHING)
        calling = pool.submit(client.call, "count")
        assert eventually(gate.with_suffix(".begun").exists)
        assert not calling.done()
        gate.touch()

        assert calling.result(30.0) == (1,)
        assert client.receive_step(step).observation[0] == [1.0]


def test_a_partial_reset_keeps_the_observations_of_the_other_lanes() -> None:
    with EnvServer("CartPole-v1", num_envs=3) as server:
        client = EnvClient(Dial(server.address))
        before = array(client.reset(seeds=[1, 2, 3]))
        client.step([np.zeros(3, np.int64)])  # gets the road
        stepped = array(client.step([np.zeros(3, np.int64)]))
        after = array(client.reset(seeds=[9], lanes=[1]))
        client.close()

    np.testing.assert_array_equal(after[[0, 2]], stepped[[0, 2]])
    assert not np.array_equal(after[1], before[1])


def test_a_step_that_was_executed_is_answered_again_for_who_repeats_it() -> None:
    with served(Lifelike) as client:
        step = client.send_step(NOTHING)
        first = client.receive_step(step)
        client._send_on_stream(step, NOTHING)

        again = client.receive_step(step)

        assert_identical(
            (again.observation, again.rewards, again.infos),
            (first.observation, first.rewards, first.infos),
        )
        assert client.step(NOTHING).observation[0] == [2.0]


@pytest.mark.parametrize("num_skipped", [-2, 1])
def test_a_client_that_counts_wrong_loses_its_session(num_skipped: int) -> None:
    with served(Lifelike) as client:
        for _ in range(3):
            client.step(NOTHING)
        client._exchange.numbers._last += num_skipped
        client._roads.close()

        with pytest.raises(RemoteEnvError, match="out of order") as caught:
            client.step(NOTHING)
        assert not caught.value.is_recoverable
        assert [one.step_count for one in caught.value.interrupted_episodes] == [3]


def test_a_step_whose_line_is_cut_before_it_is_answered_is_executed_once() -> None:
    with EnvServer(Lifelike, allow_calls=("count",)) as server, ThreadPoolExecutor(1) as pool:
        client = EnvClient(Dial(server.address))
        for _ in range(10):
            pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
            client.step(NOTHING)  # gets the road
            os.kill(pid, signal.SIGSTOP)
            step = client.send_step(NOTHING)
            road = client._roads.road()
            assert road is not None
            road.close()
            receiving = pool.submit(client.receive_step, step)
            assert eventually(lambda: num_messages(client) == client._exchange.num_received + 1)
            os.kill(pid, signal.SIGCONT)
            receiving.result(30.0)
            assert client.call("count") == (2,)
        client.close()


# --- what goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "code"),
    [(Fault.RAISE, "INTERNAL"), (Fault.EXIT, "CRASHED"), (Fault.SEGFAULT, "CRASHED")],
)
def test_a_failing_step_is_told_as_ever_and_a_reset_starts_over(fault: Fault, code: str) -> None:
    with served(lambda: FaultyEnv(fault, at_step=2)) as client:
        for _ in range(2):
            client.step(NOTHING)
            with pytest.raises(RemoteEnvError) as caught:
                client.step(NOTHING)
            assert (caught.value.code, caught.value.is_recoverable) == (code, True)
            (interrupted,) = caught.value.interrupted_episodes
            assert interrupted.step_count == 1
            with pytest.raises(RemoteEnvError, match="needs a Reset first"):
                client.step(NOTHING)
            client.reset()
        client.step(NOTHING)
        assert has_road(client)


def test_a_worker_that_dies_between_two_steps_is_found_out_by_the_next() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(Dial(server.address))
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        client.step(NOTHING)
        os.kill(pid, 9)
        assert eventually(lambda: not has_road_left(client))

        with pytest.raises(RemoteEnvError) as caught:
            client.step(NOTHING)

        assert caught.value.code == "CRASHED"
        assert [one.step_count for one in caught.value.interrupted_episodes] == [1]
        client.reset()
        assert client.step(NOTHING).observation[0] == [1.0]
        client.close()


def has_road_left(client: EnvClient) -> bool:
    road = client._roads.road()
    assert road is not None
    try:
        return bool(road._worker.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


def test_an_action_outside_its_domain_ends_the_session() -> None:
    with served("CartPole-v1") as client:
        with pytest.raises(RemoteEnvError) as caught:
            client.step([np.array([5])])
        assert (caught.value.code, caught.value.is_recoverable) == ("INVALID_ACTION", False)
        with pytest.raises(EndpointError, match="ended with an error"):
            client.step(NOTHING)


def test_the_endpoint_gives_up_before_its_client_does() -> None:
    with served(Lifelike, step_timeout_s=20.0) as client:
        assert client._server_timeout_ms == 18_000


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Have endpoints give up after 700 ms: much sooner than clients, on busy machines too."""

    @contextlib.contextmanager
    def give_up_soon() -> Iterator[None]:
        with monkeypatch.context() as here:
            here.setattr(EnvClient, "_server_timeout_ms", 700)
            yield

    return give_up_soon


@pytest.mark.parametrize("fault", [Fault.HANG, Fault.SPIN])
def test_a_deadline_is_kept_whatever_the_environment_does(
    fault: Fault, impatient: Callable[[], Any]
) -> None:
    with served(lambda: FaultyEnv(fault, at_step=2), step_grace_s=0.0) as client:
        client.step(NOTHING)
        begun_s = time.monotonic()
        with impatient(), pytest.raises(RemoteEnvError, match="no result within 700 ms") as caught:
            client.step(NOTHING)
        elapsed_s = time.monotonic() - begun_s

        assert caught.value.code == "TIMEOUT"
        assert elapsed_s >= 0.69
        assert [one.step_count for one in caught.value.interrupted_episodes] == [1]
        client.reset()
        assert client.step(NOTHING).observation[0] == pytest.approx(0.01)
        assert has_road(client)


def test_a_worker_that_finishes_late_serves_on_and_its_result_reaches_nobody(
    tmp_path: Path, impatient: Callable[[], Any]
) -> None:
    gate = tmp_path / "gate"
    with EnvServer(lambda: Gated(str(gate)), step_grace_s=60.0) as server:
        client = EnvClient(Dial(server.address))
        pid = client.reset().infos["pid"]
        with impatient(), pytest.raises(RemoteEnvError, match="no result within 700 ms"):
            client.step(NOTHING)
        gate.touch()

        assert client.reset().infos["pid"] == pid
        assert client.step(NOTHING).observation[0] == [1.0]
        client.close()


def test_a_client_that_vanishes_in_mid_step_costs_only_its_worker(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with EnvServer(lambda: Gated(str(gate)), max_sessions=1, step_grace_s=60.0) as server:
        client = EnvClient(Dial(server.address))
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        client._stream.close()

        assert eventually(lambda: server.num_sessions == 0)
        assert eventually(lambda: not Path(f"/proc/{pid}").exists())
        gate.touch()
        with RemoteEnv(server.address) as env:
            env.reset()
            assert env.step(0)[0] == [1.0]
        client.close()


def test_a_draining_endpoint_keeps_the_deadline_of_the_step_in_progress(
    tmp_path: Path, impatient: Callable[[], Any]
) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer(lambda: Gated(str(gate)), step_grace_s=0.0) as server,
        impatient(),
        session(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        step = client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        stopping = pool.submit(server.stop, 30.0)
        assert eventually(lambda: not server.health().is_serving)

        with pytest.raises(RemoteEnvError, match="no result within 700 ms"):
            client.receive_step(step)
        stopping.result(60.0)


def test_a_draining_endpoint_answers_the_step_in_progress(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer(lambda: Gated(str(gate))) as server,
        session(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        step = client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        stopping = pool.submit(server.stop, 30.0)
        assert eventually(lambda: not server.health().is_serving)
        gate.touch()

        assert client.receive_step(step).observation[0] == [1.0]
        with pytest.raises(EndpointError):  # a few more may be taken until the road is cut
            assert [client.step(NOTHING) for _ in range(10_000)] == []
        stopping.result(60.0)


# --- strangers, and what is left -----------------------------------------------------------------


def test_memory_that_a_client_got_cannot_be_shrunk_and_is_nobody_else_s() -> None:
    with EnvServer(Lifelike, max_sessions=1) as server:
        first = EnvClient(Dial(server.address))
        first.reset()
        first.step(NOTHING)
        road = first._roads.road()
        assert road is not None
        mine = road._block.observations[0]
        first.close()
        with RemoteEnv(server.address) as env:
            env.reset()
            env.step(0)
            env.step(0)

            assert mine.tolist() == [[1.0]]  # type: ignore[union-attr]


def test_the_block_is_sealed() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(Dial(server.address))
        client.reset()
        descriptors = greet(server, client)[1]
        with pytest.raises(PermissionError):
            os.ftruncate(descriptors[0], 0)
        for descriptor in descriptors:
            os.close(descriptor)
        client.close()


def greet(server: EnvServer, client: EnvClient, timeout_ms: int = 1000) -> tuple[bytes, list[int]]:
    """Come to the endpoint's broker as ``client`` would."""
    session_id = client._session_id
    return come(server, wire.Greeting(session_id, timeout_ms).pack())


def come(server: EnvServer, greeting: bytes) -> tuple[bytes, list[int]]:
    name = shake_hands(Dial(server.address)).capabilities[capabilities.SHARED_MEMORY]
    where = wire.socket_address(name)
    assert where is not None
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(20.0)
        peer.connect(where)
        peer.sendall(greeting)
        peer.shutdown(socket.SHUT_WR)
        answer, descriptors, _, _ = socket.recv_fds(peer, 1, 8)
    return answer, list(descriptors)


@pytest.mark.parametrize(
    "greeting",
    [
        wire.Greeting("0" * 32, 1000).pack(),
        b"\xff" * wire.GREETING_BYTES,
        b"GET / HTTP/1.1\r\n\r\n",
        b"",
    ],
)
def test_strangers_get_nothing_at_the_broker(greeting: bytes) -> None:
    with EnvServer(Lifelike) as server, session(server) as client:
        answer, descriptors = come(server, greeting)

        assert (answer, descriptors) in [(wire.REFUSED, []), (b"", [])]
        client.step(NOTHING)


def test_a_session_that_is_over_gets_nothing_at_the_broker() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(Dial(server.address))
        client.reset()
        client.close()

        assert greet(server, client) == (wire.REFUSED, [])


def test_who_joins_with_the_session_id_of_another_takes_nothing_from_it() -> None:
    with EnvServer(Lifelike) as server, session(server) as client:
        metadata = client._metadata
        replay = JoinStream(client._channel, "/rlmesh.env.v1.EnvService/Join", metadata, "")
        replay.send(env_wire.pack_request(Close("1")))
        replay.receive(20.0)
        replay.close()

        assert eventually(lambda: server.num_sessions == 1)
        client.step(NOTHING)
        assert has_road(client)


def test_a_session_without_a_reset_gets_nothing_at_the_broker() -> None:
    with EnvServer(Lifelike) as server:
        client = EnvClient(Dial(server.address))
        client.render()

        assert greet(server, client) == (wire.REFUSED, [])
        client.close()


@contextlib.contextmanager
def silent_connections(server: EnvServer, count: int) -> Iterator[list[socket.socket]]:
    """Connect to the endpoint's socket for roads, and say nothing."""
    with contextlib.ExitStack() as owned:
        peers = [owned.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for peer in peers:
            peer.settimeout(20.0)
            peer.connect(socket_for_roads(server))
        yield peers


def socket_for_roads(server: EnvServer) -> bytes:
    name = shake_hands(Dial(server.address)).capabilities[capabilities.SHARED_MEMORY]
    where = wire.socket_address(name)
    assert where is not None
    return where


def is_open(peer: socket.socket) -> bool:
    """Whether the other end, which says nothing either, has not closed the connection."""
    return not select.select([peer], [], [], 0.0)[0]


def test_silent_connections_keep_nobody_from_shared_memory() -> None:
    with (
        EnvServer(Lifelike) as server,
        silent_connections(server, 65),
        session(server) as client,
    ):
        client.step(NOTHING)

        assert has_road(client)


@pytest.fixture
def patient_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the endpoint close no connection because it has been silent for long."""
    monkeypatch.setattr(broker, "_GREETING_TIMEOUT_S", 600.0)


def test_the_oldest_silent_connection_is_given_up_for_the_newest(patient_broker: None) -> None:
    with EnvServer(Lifelike) as server, silent_connections(server, 17) as peers:
        assert peers[0].recv(1) == b""
        assert all(is_open(peer) for peer in peers[1:])


def test_silent_connections_of_other_users_take_no_place_of_the_same_user(
    monkeypatch: pytest.MonkeyPatch, patient_broker: None
) -> None:
    users = iter([os.geteuid(), *[os.geteuid() + 1] * 30, 0])
    monkeypatch.setattr(door, "user_of", lambda _: next(users))
    with EnvServer(Lifelike) as server, silent_connections(server, 32) as peers:
        # Other users share the 15 places that are left: the last 15 of them, less one for root.
        for peer in peers[1:17]:
            assert peer.recv(1) == b""
        assert all(is_open(peer) for peer in [peers[0], *peers[17:]])


def test_other_users_are_turned_away_where_the_same_user_has_all_places(
    monkeypatch: pytest.MonkeyPatch, patient_broker: None
) -> None:
    users = iter([*[os.geteuid()] * 16, os.geteuid() + 1])
    monkeypatch.setattr(door, "user_of", lambda _: next(users))
    with EnvServer(Lifelike) as server, silent_connections(server, 17) as peers:
        assert peers[16].recv(1) == b""
        assert all(is_open(peer) for peer in peers[:16])


OTHER_USER = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
peers = [socket.socket(socket.AF_UNIX) for _ in range(100)]
for peer in peers:
    peer.connect(bytes.fromhex(sys.argv[1]))
assert peers[84].recv(1) == b"", "the last one that has to go"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_client_of_the_same_user_is_not_given_up_for_a_hundred_of_another(
    patient_broker: None,
) -> None:
    with EnvServer(Lifelike) as server, silent_connections(server, 1) as (ours,):
        script = [sys.executable, "-c", OTHER_USER, socket_for_roads(server).hex()]
        subprocess.run(script, timeout=60, check=True)

        assert is_open(ours)


def test_nonsense_on_a_road_costs_its_sender_s_session_at_most() -> None:
    with EnvServer(Lifelike) as server, session(server) as client:
        client.step(NOTHING)
        road = client._roads.road()
        assert road is not None
        worker = road._worker
        worker.send(b"\xff" * 16)  # a number beyond every other, and no deadline
        worker.send(b"nonsense")
        worker.connection.shutdown(socket.SHUT_WR)
        with RemoteEnv(server.address) as env:
            env.reset()
            assert env.step(0)[0] == [1.0]


def test_lines_leave_no_descriptor_and_no_process_behind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with EnvServer(Lifelike) as server:

        def step_once() -> None:
            with session(server) as client:
                client.step(NOTHING)
                assert has_road(client)

        step_once()
        assert eventually(lambda: server.num_sessions == 0)
        before = descriptors()
        for _ in range(10):
            step_once()
        assert eventually(lambda: server.num_sessions == 0)
        assert eventually(lambda: descriptors() <= before + 2)
