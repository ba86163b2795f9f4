"""Steps on a direct connection keep every rule that steps as messages keep."""

import contextlib
import dataclasses
import functools
import gc
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlmesh_ray import EnvServer, RemoteEnv
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env import env_client
from rlmesh_ray.client.env.env_client import EnvClient
from rlmesh_ray.errors import (
    CodecError,
    EndpointError,
    EndpointLostError,
    EndpointTimeoutError,
    RemoteEnvError,
)
from rlmesh_ray.polling import AdaptiveSpin
from rlmesh_ray.protocol.client_session import timeout_error
from rlmesh_ray.testing.envs import SPACES, EchoEnv, Fault
from rlmesh_ray.testing.equality import assert_identical
from rlmesh_ray.transport import exactly_once
from rlmesh_ray.transport.direct_connection import DirectConnection
from rlmesh_ray.transport.exactly_once import ClientSide
from tests.loopback.client_internals import (
    direct_connection,
    endpoints_give_up_after,
    hang_up,
    join_stream,
    num_unanswered,
    step_timeout,
    vanish,
)
from tests.loopback.direct_sessions import (
    NOTHING,
    array,
    has_direct_connection,
    served,
    session,
)
from tests.loopback.eventually import eventually
from tests.loopback.lifelike import Breakable, Gated, Lifelike

# What is allowed when does not depend on the transport; how data move and connections break does.
over_both = pytest.mark.parametrize("transport", ["shared_memory", "tcp"])


@pytest.fixture(
    name="transport",
    params=["shared_memory", pytest.param("tcp", marks=pytest.mark.nightly)],
)
def _transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Stumbling(Lifelike):
    """Raises at action 1."""

    def step(self, action: Any) -> Any:
        if action:
            raise ValueError("it has stumbled")
        return super().step(action)


@pytest.fixture(scope="module")
def stumbling() -> Iterator[EnvServer]:
    """Serve one environment after the other, from one worker for as long as nothing ends it."""
    with EnvServer(Stumbling, _step_grace_s=0.0, allow_calls=("count", "nothing")) as server:
        yield server


@pytest.fixture(scope="module")
def cartpoles() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=3) as server:
        yield server


@pytest.fixture(scope="module")
def breakable() -> Iterator[EnvServer]:
    with EnvServer(Breakable, _step_grace_s=0.0) as server:
        yield server


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EnvServer, Path]]:
    path = tmp_path_factory.mktemp("gated") / "gate"
    with EnvServer(lambda: Gated(str(path)), _step_grace_s=60.0, allow_calls=("count",)) as server:
        yield server, path


@pytest.fixture
def gate(gated: tuple[EnvServer, Path]) -> Iterator[Path]:
    """Return the gate of the environments of ``gated``, which is closed."""
    _, path = gated
    path.unlink(missing_ok=True)
    path.with_suffix(".begun").unlink(missing_ok=True)
    yield path
    path.touch()


@over_both
def test_steps_send_no_messages(transport: str, cartpoles: EnvServer) -> None:
    with session(cartpoles, transport) as client:
        before = client.session.num_sent
        for _ in range(10):
            client.step([np.zeros(3, np.int64)])

        assert client.session.num_sent == before
        assert has_direct_connection(client)


def spins() -> list[AdaptiveSpin]:
    """Return what decides in this process how long waits spin."""
    return [each for each in gc.get_objects() if type(each) is AdaptiveSpin]


def ever_spins(spin: AdaptiveSpin) -> bool:
    """Return whether short waits make the next ones spin."""
    found = False
    for _ in range(30):
        spin.begin()
        spin.learn()
        found |= spin.spin_s > 0.0
    return found


class Curious(EchoEnv):
    """Tells which waits of its process ever spin."""

    def which_spin(self) -> list[bool]:
        return [ever_spins(each) for each in spins()]


@pytest.mark.parametrize("spin", [False, True])
def test_the_environment_variable_decides_whether_the_worker_and_the_client_spin(
    transport: str, spin: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLMESH_RAY_SPIN", str(int(spin)))
    curious = functools.partial(Curious, SPACES["box"])
    with (
        EnvServer(curious, allow_calls=["which_spin"]) as server,
        contextlib.closing(
            EnvClient(ConnectOptions(server.address), transport=transport)
        ) as client,
    ):
        client.reset()
        before = spins()
        (of_worker,) = client.call("which_spin")
        client.step([np.zeros((1, 2, 3), np.float32)])
        of_client = [ever_spins(each) for each in spins() if each not in before]

        assert of_worker == [spin, spin]
        assert has_direct_connection(client)
        assert of_client == [spin]


def test_no_step_takes_the_direct_connection_of_a_session_whose_stream_has_ended(
    transport: str, monkeypatch: pytest.MonkeyPatch, cartpoles: EnvServer
) -> None:
    monkeypatch.setattr(env_client, "_STREAM_PERIOD_S", 0.0)
    with session(cartpoles, transport) as client:
        client.step([np.zeros(3, np.int64)])
        assert has_direct_connection(client)
        vanish(client)

        with pytest.raises(EndpointError, match="the session"):
            client.step([np.zeros(3, np.int64)])

        assert not has_direct_connection(client)


def test_thousands_of_lanes_step_directly_as_soon_as_they_are_reset(transport: str) -> None:
    with served(functools.partial(Many, 2000), transport) as client:
        for count in (1, 2):
            assert set(array(client.step([np.zeros(2000, np.int64)])).ravel()) == {count}
        assert has_direct_connection(client)


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


class Talkative(Lifelike):
    """Tells more than sockets hold."""

    def step(self, action: Any) -> Any:
        *rest, infos = super().step(action)
        return (*rest, {**infos, "text": "x" * 16_000_000})


@over_both
def test_a_call_before_a_large_answer_is_read_waits_for_the_answer(transport: str) -> None:
    with served(Talkative, transport, allow_calls=("count",)) as client:
        client.step(NOTHING)
        step = client.send_step(NOTHING)

        assert client.call("count") == (2,)
        assert array(client.receive_step(step)).item() == 2
        assert has_direct_connection(client)


def test_a_worker_that_does_not_come_to_a_step_misses_its_deadline(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        client.step(NOTHING)
        assert has_direct_connection(client)
        os.kill(pid, signal.SIGSTOP)
        with (
            step_timeout(client, 0.5),
            pytest.raises(RemoteEnvError, match="TIMEOUT: no result within") as caught,
        ):
            client.step(NOTHING)
        assert caught.value.is_recoverable
        client.reset()

        assert array(client.step(NOTHING)).item() == 1


def test_a_step_without_an_answer_takes_its_timeout_and_a_second_at_most(
    transport: str, monkeypatch: pytest.MonkeyPatch, stumbling: EnvServer
) -> None:
    now_s = 1e6

    def receive(direct: DirectConnection, timeout_s: float) -> None:
        nonlocal now_s
        now_s += timeout_s
        direct.close()

    def hear_nothing(timeout_s: float) -> bytes:
        nonlocal now_s
        now_s += timeout_s
        raise timeout_error(timeout_s, "")

    with session(stumbling, transport, step_timeout_s=100.0) as client:
        client.step(NOTHING)
        monkeypatch.setattr(env_client, "time", SimpleNamespace(monotonic=lambda: now_s))
        monkeypatch.setattr(DirectConnection, "receive", receive)
        monkeypatch.setattr(join_stream(client), "receive", hear_nothing)
        with pytest.raises(EndpointTimeoutError, match="no answer within 100 s"):
            client.step(NOTHING)
        monkeypatch.undo()

    assert 100.0 <= now_s - 1e6 <= 101.0


def test_who_sends_while_another_thread_receives_waits_for_it(
    transport: str, gated: tuple[EnvServer, Path], gate: Path
) -> None:
    with session(gated[0], transport) as client, ThreadPoolExecutor(2) as pool:
        first = client.send_step(NOTHING)
        receiving = pool.submit(client.receive_step, first)
        assert eventually(lambda: client.wakeup() is None)
        sending = pool.submit(client.send_step, NOTHING)
        gate.touch()

        assert array(receiving.result(30.0)).item() == 1
        assert array(client.receive_step(sending.result(30.0))).item() == 2


def test_a_timeout_may_be_as_long_as_the_caller_likes(transport: str, stumbling: EnvServer) -> None:
    with session(stumbling, transport, step_timeout_s=1e15) as client:
        assert array(client.step(NOTHING)).item() == 1
        assert has_direct_connection(client)


def test_statistics_show_when_a_client_has_left_its_direct_connection(
    transport: str, stumbling: EnvServer
) -> None:
    assert eventually(lambda: stumbling.num_sessions == 0)  # a former one ends just now
    with session(stumbling, transport) as client:
        client.step(NOTHING)
        assert stumbling.statistics().transports == {transport: 1}
        client.direct_connector.close()

        assert eventually(lambda: stumbling.statistics().transports == {"grpc": 1})


class SlowToTell(Lifelike):
    """Waits in a call for as long as a file is not there."""

    def wait_for(self, gate: str) -> bool:
        return eventually(Path(gate).exists, 600.0)


def test_after_a_call_that_is_late_steps_and_resets_of_some_lanes_continue(
    transport: str, tmp_path: Path
) -> None:
    gates = [tmp_path / "first", tmp_path / "second"]
    with served(
        SlowToTell, transport, num_envs=2, allow_calls=("wait_for",), _step_grace_s=600.0
    ) as client:
        action = [np.zeros(2, np.int64)]
        client.step(action)
        assert has_direct_connection(client)
        uses: list[Callable[[], Any]] = [
            lambda: client.step(action),
            lambda: client.reset(lanes=[0]),
        ]
        for gate, use, counts in zip(gates, uses, ([[2], [2]], [[0], [2]]), strict=True):
            with endpoints_give_up_after(100), pytest.raises(RemoteEnvError, match="TIMEOUT"):
                client.call("wait_for", str(gate))
            gate.touch()
            client.call("wait_for", str(gate))  # waits until the late one has returned

            assert array(use()).tolist() == counts

        assert array(client.step(action)).tolist() == [[1], [3]]


def test_a_request_that_is_refused_after_many_direct_steps_keeps_no_later_one_away(
    transport: str, monkeypatch: pytest.MonkeyPatch, cartpoles: EnvServer
) -> None:
    monkeypatch.setattr(exactly_once, "_MOST_AHEAD", 2)
    with session(cartpoles, transport) as client:
        action = [np.zeros(3, np.int64)]
        for _ in range(8):
            client.step(action)
        assert has_direct_connection(client)
        with pytest.raises(RemoteEnvError, match="INVALID"):
            client.reset(lanes=[7])

        client.step(action)
        client.reset()


@pytest.mark.parametrize("is_disconnected", [False, True], ids=["raises", "cut"])
def test_a_call_overtakes_no_step_whose_answer_comes_by_the_stream(
    transport: str, is_disconnected: bool, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        client.step(NOTHING)
        pending = client.send_step(NOTHING if is_disconnected else [np.ones(1, np.int64)])
        if is_disconnected:
            hang_up(client)

        (count,) = client.call("count")

        if is_disconnected:
            assert count == 2
            assert array(client.receive_step(pending)).item() == 2
        else:
            with pytest.raises(RemoteEnvError, match="it has stumbled"):
                client.receive_step(pending)


def test_requests_that_are_refused_after_a_failure_keep_no_reset_away(stumbling: EnvServer) -> None:
    with session(stumbling, "grpc") as client:
        for _ in range(20):
            sent = [client.send_step([np.full(1, action)], is_last=False) for action in (1, 0, 0)]
            for request_id in sent:
                with pytest.raises(RemoteEnvError):
                    client.receive_step(request_id)
            client.reset()
        assert array(client.step(NOTHING)).item() == 1


def test_a_call_that_raises_leaves_the_direct_connection_open(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        client.step(NOTHING)
        with pytest.raises(RemoteEnvError, match="nothing"):
            client.call("nothing")
        before = client.session.num_sent

        assert [array(client.step(NOTHING)).item() for _ in range(3)] == [2, 3, 4]
        assert client.session.num_sent == before


def test_a_lost_direct_connection_is_replaced_but_not_for_ever(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        for count in range(1, 5):
            hang_up(client)
            assert array(client.step(NOTHING)).item() == count
        for _ in range(2):  # this client insists on one
            with pytest.raises(
                EndpointLostError, match=r"lost again and again \(4 times\); leave transport"
            ):
                client.step(NOTHING)
        client.reset()
        client.step(NOTHING)

        assert has_direct_connection(client)


def test_a_client_looks_for_its_answer_and_is_not_held_up_by_the_look(
    transport: str, gated: tuple[EnvServer, Path], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A look that waited (it did, for 3 s at most) would have the step miss its deadline here.
    receive = DirectConnection.receive

    def open_the_gate(direct: DirectConnection, timeout_s: float) -> bytearray | None:
        gate.touch()
        return receive(direct, timeout_s)

    monkeypatch.setattr(DirectConnection, "receive", open_the_gate)
    with session(gated[0], transport, step_timeout_s=2.5) as client:
        assert array(client.step(NOTHING)).tolist() == [[1.0]]
        assert has_direct_connection(client)


@over_both
def test_what_arrives_is_the_caller_s_own(transport: str, stumbling: EnvServer) -> None:
    with session(stumbling, transport) as client:
        first = client.step(NOTHING)
        kept = first.observation[0].copy(), first.rewards.copy()  # type: ignore[union-attr]
        client.step(NOTHING)

        np.testing.assert_array_equal(first.observation[0], kept[0])
        np.testing.assert_array_equal(first.rewards, kept[1])


def test_episodes_are_accounted_as_they_are_of_messages() -> None:
    def account(transport: str) -> list[Any]:
        client = EnvClient(ConnectOptions(server.address), transport=transport)
        ids = [client.reset(seeds=[5, 6]).episode_ids]
        reported = []
        for actions in ([0, 0], [1, 0], [0, 0], [0, 1]):
            result = client.step([np.array(actions)])
            reported.append(result.completed_episodes)
            ids.append(result.episode_ids)
        ids.append(client.reset(lanes=[0]).episode_ids)
        reported.append(client.step([np.array([1, 1])]).completed_episodes)
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
            for each in reported
        ]
        return [records, [[bool(own) for own in each] for each in ids]]

    with EnvServer(Lifelike, num_envs=2) as server:
        assert account("shared_memory") == account("tcp") == account("grpc")


def test_a_wrong_action_is_refused_before_it_is_sent(transport: str, cartpoles: EnvServer) -> None:
    with session(cartpoles, transport) as client:
        for wrong in (np.zeros(2, np.int64), np.zeros((3, 1), np.int64), np.zeros(3, np.float32)):
            with pytest.raises(CodecError, match="expected 3 lanes of int64"):
                client.step([wrong])
        with pytest.raises(CodecError, match="0 columns for 1 leaf"):
            client.step([])
        client.step([np.zeros(3, np.int64)])


def test_a_reset_waits_for_the_step_before_it(transport: str, stumbling: EnvServer) -> None:
    with session(stumbling, transport) as client:
        step = client.send_step(NOTHING)
        reset = client.send_reset()

        assert client.receive_step(step).observation[0] == [1.0]
        assert client.receive_reset(reset).observation[0] == [0.0]
        assert client.step(NOTHING).observation[0] == [1.0]


def test_steps_may_be_sent_ahead(transport: str, stumbling: EnvServer) -> None:
    with session(stumbling, transport) as client:
        sent = [client.send_step(NOTHING) for _ in range(5)]
        counts = [np.ravel(client.receive_step(one).observation[0])[0] for one in sent]

        assert counts == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_call_does_not_overtake_a_step(
    transport: str, gated: tuple[EnvServer, Path], gate: Path
) -> None:
    with session(gated[0], transport) as client, ThreadPoolExecutor(1) as pool:
        step = client.send_step(NOTHING)
        calling = pool.submit(client.call, "count")
        assert eventually(gate.with_suffix(".begun").exists)
        assert not calling.done()
        gate.touch()

        assert calling.result(30.0) == (1,)
        assert client.receive_step(step).observation[0] == [1.0]


def test_a_partial_reset_keeps_the_observations_of_the_other_lanes(
    transport: str, cartpoles: EnvServer
) -> None:
    with session(cartpoles, transport) as client:
        before = array(client.reset(seeds=[1, 2, 3]))
        client.step([np.zeros(3, np.int64)])  # gets the direct connection
        stepped = array(client.step([np.zeros(3, np.int64)]))
        after = array(client.reset(seeds=[9], lanes=[1]))

    np.testing.assert_array_equal(after[[0, 2]], stepped[[0, 2]])
    assert not np.array_equal(after[1], before[1])


def test_a_step_that_was_executed_is_answered_again_for_who_repeats_it(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        step = client.send_step(NOTHING)
        first = client.receive_step(step)
        client.send(client.dialect.step(step, NOTHING, 60_000), is_repeated=True)

        again = client.receive_step(step)

        assert_identical(
            (again.observation, again.rewards, again.infos),
            (first.observation, first.rewards, first.infos),
        )
        assert client.step(NOTHING).observation[0] == [2.0]


@pytest.mark.parametrize("num_skipped", [-2, 1])
def test_a_client_that_counts_wrong_loses_its_session(
    transport: str, num_skipped: int, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        for _ in range(3):
            client.step(NOTHING)
        wrong = ClientSide()
        for _ in range(client.numbers.next_number - 1 + num_skipped):
            wrong.sent()
        client.numbers = wrong
        client.direct_connector.close()

        with pytest.raises(RemoteEnvError, match="out of order") as caught:
            client.step(NOTHING)
        assert not caught.value.is_recoverable
        assert [one.step_count for one in caught.value.interrupted_episodes] == [3]


@over_both
def test_a_step_whose_line_is_cut_before_it_is_answered_is_executed_once(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client, ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
            client.step(NOTHING)  # gets the direct connection
            os.kill(pid, signal.SIGSTOP)
            step = client.send_step(NOTHING)
            direct_connection(client).close()
            receiving = pool.submit(client.receive_step, step)
            assert eventually(lambda: num_unanswered(client) == 1)
            os.kill(pid, signal.SIGCONT)
            receiving.result(30.0)
            assert client.call("count") == (2,)


# Each end of a worker is seen on one of the connections.
@pytest.mark.parametrize(
    ("transport", "fault", "code"),
    [
        ("shared_memory", Fault.RAISE, "INTERNAL"),
        ("shared_memory", Fault.SEGFAULT, "CRASHED"),
        ("tcp", Fault.RAISE, "INTERNAL"),
        ("tcp", Fault.EXIT, "CRASHED"),
        pytest.param("shared_memory", Fault.EXIT, "CRASHED", marks=pytest.mark.nightly),
        pytest.param("tcp", Fault.SEGFAULT, "CRASHED", marks=pytest.mark.nightly),
    ],
)
def test_a_failing_step_is_reported_as_usual_and_a_reset_starts_over(
    transport: str, fault: Fault, code: str, breakable: EnvServer
) -> None:
    with session(breakable, transport) as client:
        client.reset(options={"fault": fault.name, "at_step": 2})
        client.step(NOTHING)
        with pytest.raises(RemoteEnvError) as caught:
            client.step(NOTHING)
        assert (caught.value.code, caught.value.is_recoverable) == (code, True)
        (interrupted,) = caught.value.interrupted_episodes
        assert interrupted.step_count == 1
        with pytest.raises(RemoteEnvError, match="needs a Reset first"):
            client.step(NOTHING)
        client.reset()
        for count in (1, 2):
            assert client.step(NOTHING).observation[0] == pytest.approx(count / 100)
        assert has_direct_connection(client)


@over_both
def test_a_worker_that_dies_between_two_steps_is_found_out_by_the_next(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        client.step(NOTHING)
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([process], [], [], 20.0)[0]  # its end of the connection is closed
        os.close(process)

        with pytest.raises(RemoteEnvError) as caught:
            client.step(NOTHING)

        assert caught.value.code == "CRASHED"
        assert [one.step_count for one in caught.value.interrupted_episodes] == [1]
        client.reset()
        assert client.step(NOTHING).observation[0] == [1.0]


def test_an_action_outside_its_domain_ends_the_session(
    transport: str, cartpoles: EnvServer
) -> None:
    with session(cartpoles, transport) as client:
        with pytest.raises(RemoteEnvError) as caught:
            client.step([np.array([0, 5, 0])])
        assert (caught.value.code, caught.value.is_recoverable) == ("INVALID_ACTION", False)
        with pytest.raises(EndpointError, match="ended with an error"):
            client.step([np.zeros(3, np.int64)])


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        ("shared_memory", Fault.SPIN),
        ("tcp", Fault.HANG),
        pytest.param("shared_memory", Fault.HANG, marks=pytest.mark.nightly),
    ],
)
def test_a_deadline_is_kept_however_the_environment_behaves(
    transport: str, fault: Fault, breakable: EnvServer
) -> None:
    with session(breakable, transport) as client:
        client.reset(options={"fault": fault.name, "at_step": 2})
        client.step(NOTHING)
        begun_s = time.monotonic()
        with (
            endpoints_give_up_after(700),
            pytest.raises(RemoteEnvError, match="no result within 700 ms") as caught,
        ):
            client.step(NOTHING)
        elapsed_s = time.monotonic() - begun_s

        assert caught.value.code == "TIMEOUT"
        assert elapsed_s >= 0.69
        assert [one.step_count for one in caught.value.interrupted_episodes] == [1]
        client.reset()
        assert client.step(NOTHING).observation[0] == pytest.approx(0.01)
        assert has_direct_connection(client)


def test_a_worker_that_finishes_late_serves_on_and_its_result_is_dropped(
    transport: str, gated: tuple[EnvServer, Path], gate: Path
) -> None:
    with session(gated[0], transport) as client:
        pid = client.reset().infos["pid"]
        with (
            endpoints_give_up_after(700),
            pytest.raises(RemoteEnvError, match="no result within 700 ms"),
        ):
            client.step(NOTHING)
        gate.touch()

        assert client.reset().infos["pid"] == pid
        assert client.step(NOTHING).observation[0] == [1.0]


@over_both
def test_a_client_that_vanishes_in_mid_step_costs_only_its_worker(
    transport: str, gated: tuple[EnvServer, Path], gate: Path
) -> None:
    server, _ = gated
    with session(server, transport) as client:
        pid = int(client.reset().infos["pid"][0])  # type: ignore[index]
        client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        vanish(client)

        assert eventually(lambda: server.num_sessions == 0)
        assert eventually(lambda: not Path(f"/proc/{pid}").exists())
        gate.touch()
        with RemoteEnv(server.address) as env:
            env.reset()
            assert env.step(0)[0] == [1.0]


def test_a_draining_endpoint_keeps_the_deadline_of_the_step_in_progress(
    transport: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer(lambda: Gated(str(gate)), _step_grace_s=0.0) as server,
        endpoints_give_up_after(700),
        session(server, transport) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        step = client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        stopping = pool.submit(server.stop, 30.0)
        assert eventually(lambda: not server.health().is_serving)

        with pytest.raises(RemoteEnvError, match="no result within 700 ms"):
            client.receive_step(step)
        stopping.result(60.0)


def test_a_draining_endpoint_answers_the_step_in_progress(transport: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with (
        EnvServer(lambda: Gated(str(gate))) as server,
        session(server, transport) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        step = client.send_step(NOTHING)
        assert eventually(gate.with_suffix(".begun").exists)
        stopping = pool.submit(server.stop, 30.0)
        assert eventually(lambda: not server.health().is_serving)
        gate.touch()

        assert client.receive_step(step).observation[0] == [1.0]
        with pytest.raises(EndpointError):  # a few more may be taken until the connection is cut
            assert [client.step(NOTHING) for _ in range(10_000)] == []
        stopping.result(60.0)


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


@over_both
def test_nonsense_on_a_direct_connection_costs_its_sender_s_session_at_most(
    transport: str, stumbling: EnvServer
) -> None:
    with session(stumbling, transport) as client:
        client.step(NOTHING)
        worker = direct_connection(client).worker_socket
        worker.send(b"\xff" * 16)  # a number beyond every other, and no deadline
        worker.send(b"nonsense")
        worker.connection.shutdown(socket.SHUT_WR)
        with RemoteEnv(stumbling.address) as env:
            env.reset()
            assert env.step(0)[0] == [1.0]


@over_both
def test_lines_leave_no_descriptor_and_no_process_behind(
    transport: str, stumbling: EnvServer
) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def step_once() -> None:
        with session(stumbling, transport) as client:
            client.step(NOTHING)
            assert has_direct_connection(client)

    step_once()
    assert eventually(lambda: stumbling.num_sessions == 0)
    before = descriptors()
    for _ in range(10):
        step_once()
    assert eventually(lambda: stumbling.num_sessions == 0)
    # Fewer than one for each session: a spare worker, which has some, may have come meanwhile.
    assert eventually(lambda: descriptors() < before + 10)
