"""What states of sequences mean for lanes."""

import itertools

import pytest

from rlmesh_ray.dialects.dm_env_rpc.client.lane_steps import LaneState
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.dialects.dm_env_rpc.protocol import SequenceState
from rlmesh_ray.errors import RemoteProtocolError

RUNNING, TERMINATED, INTERRUPTED = SequenceState


def running(settings: DmEnvRpcSettings | None = None) -> LaneState:
    states = LaneState(0, settings or DmEnvRpcSettings())
    states.step(RUNNING, 5.0, None)
    return states


@pytest.mark.parametrize("before", ["joined", "reset", TERMINATED, INTERRUPTED])
def test_the_first_step_begins_and_earns_nothing(before: object) -> None:
    states = LaneState(0, DmEnvRpcSettings())
    if before != "joined":
        states = running()
    if before == "reset":
        states.reset()
    elif isinstance(before, SequenceState):
        states.step(before, 1.0, None)
    assert not states.is_running

    step = states.step(RUNNING, 7.0, 0.5)

    assert step == (0.0, False, False)
    assert states.is_running


@pytest.mark.parametrize(
    ("state", "terminated", "truncated"),
    [(RUNNING, False, False), (TERMINATED, True, False), (INTERRUPTED, False, True)],
)
def test_a_step_of_a_running_lane_is_what_its_state_says(
    state: SequenceState, terminated: bool, truncated: bool
) -> None:
    states = running()

    step = states.step(state, 7.0, None)

    assert step == (7.0, terminated, truncated)
    assert states.is_running is (state is RUNNING)


@pytest.mark.parametrize(("discount", "is_truncation"), [(None, False), (0.0, False), (0.9, True)])
def test_terminated_with_a_discount_is_a_cut(discount: float | None, is_truncation: bool) -> None:
    step = running().step(TERMINATED, 1.0, discount)

    assert step[1:] == (not is_truncation, is_truncation)


def test_a_discount_of_0_makes_no_end_of_a_cut() -> None:
    assert running().step(INTERRUPTED, 1.0, 0.0)[2]


def test_the_switch_makes_every_end_a_cut() -> None:
    step = running(DmEnvRpcSettings(truncate_on_terminated=True)).step(TERMINATED, 1.0, 0.0)

    assert step[1:] == (False, True)


@pytest.mark.parametrize(
    ("num_steps", "is_truncation"), [(1, False), (2, False), (3, True), (4, True)]
)
def test_an_end_at_the_time_limit_is_a_cut(num_steps: int, is_truncation: bool) -> None:
    states = running(DmEnvRpcSettings(time_limit_steps=3))
    for _ in range(num_steps - 1):
        states.step(RUNNING, 1.0, None)

    step = states.step(TERMINATED, 1.0, None)

    assert step[1:] == (not is_truncation, is_truncation)


def test_steps_are_counted_from_the_beginning_of_the_episode() -> None:
    states = running(DmEnvRpcSettings(time_limit_steps=2))
    states.step(RUNNING, 1.0, None)
    states.step(TERMINATED, 1.0, None)
    states.step(RUNNING, 1.0, None)

    assert states.step(TERMINATED, 1.0, None)[1]


@pytest.mark.parametrize(
    ("before", "state"),
    list(itertools.product([TERMINATED, INTERRUPTED], repeat=2)),
)
def test_a_sequence_of_no_steps_breaks_the_protocol(
    before: SequenceState, state: SequenceState
) -> None:
    states = running()
    states.step(before, 1.0, None)

    with pytest.raises(RemoteProtocolError, match=f"from {before.name} to {state.name}"):
        states.step(state, 1.0, None)


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize("state", [0, 4, -1])
def test_unknown_states_break_the_protocol(state: int, is_running: bool) -> None:
    states = running() if is_running else LaneState(0, DmEnvRpcSettings())

    with pytest.raises(RemoteProtocolError, match=f"state {state}, which"):
        states.step(state, 1.0, None)


def test_a_reset_of_a_lane_that_has_ended_changes_nothing() -> None:
    states = running()
    states.step(TERMINATED, 1.0, None)
    states.reset()

    with pytest.raises(RemoteProtocolError, match="from TERMINATED"):
        states.step(TERMINATED, 1.0, None)
