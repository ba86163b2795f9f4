from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.rllib.config.session_endpoints import (
    RunnerSpec,
    SessionLayout,
    assign_sessions,
    max_sessions_per_endpoint,
    num_envs_for,
)


def training(runner_spec: RunnerSpec, *, width: int, num_endpoints: int) -> SessionLayout:
    return assign_sessions(runner_spec, width=width, num_endpoints=num_endpoints)[0]


def by_runner(share: SessionLayout) -> list[tuple[int, ...]]:
    return [share.endpoints_of(worker) for worker in range(1, share.num_runners + 1)]


def test_the_local_runner_takes_every_endpoint() -> None:
    share = training(RunnerSpec(1, None), width=4, num_endpoints=3)

    assert share.endpoints_of(0) == (0, 1, 2)


def test_endpoints_are_dealt_out_to_remote_runners_without_overlap() -> None:
    assert by_runner(training(RunnerSpec(2, None), width=4, num_endpoints=4)) == [(0, 1), (2, 3)]


def test_more_runners_than_endpoints_share_them() -> None:
    assert by_runner(training(RunnerSpec(3, None), width=4, num_endpoints=2)) == [(0,), (0,), (1,)]


def test_a_runner_opens_the_sessions_that_its_lanes_take() -> None:
    share = training(RunnerSpec(2, 32), width=8, num_endpoints=1)

    assert by_runner(share) == [(0, 0, 0, 0), (0, 0, 0, 0)]


def test_many_sessions_keep_a_runner_to_its_own_endpoints() -> None:
    share = training(RunnerSpec(2, 32), width=8, num_endpoints=4)

    assert by_runner(share) == [(0, 0, 1, 1), (2, 2, 3, 3)]


@given(num_endpoints=st.integers(1, 12), num_runners=st.integers(1, 9), sessions=st.integers(1, 9))
def test_no_endpoint_has_more_than_one_session_above_any_other(
    num_endpoints: int, num_runners: int, sessions: int
) -> None:
    share = SessionLayout(num_endpoints, num_runners, sessions)

    counts = Counter(endpoint for own in by_runner(share) for endpoint in own)

    every = [counts[endpoint] for endpoint in range(num_endpoints)]
    assert sum(every) == share.num_sessions
    assert max(every) - min(every) <= 1
    assert max(every) == max_sessions_per_endpoint(share, None)


def test_a_runner_beyond_the_planned_ones_starts_again_at_the_first_endpoint() -> None:
    assert training(RunnerSpec(2, None), width=4, num_endpoints=2).endpoints_of(3) == (0,)


def test_lanes_that_are_no_multiple_of_the_width_are_refused_with_the_nearest() -> None:
    with pytest.raises(ContractMismatchError, match=r"is 20, .* of 8, .* set it to 16 or 24"):
        training(RunnerSpec(2, 20), width=8, num_endpoints=2)


def test_fewer_lanes_than_one_session_has_are_refused_with_the_width() -> None:
    with pytest.raises(ContractMismatchError, match="set it to 8, or leave it out"):
        training(RunnerSpec(1, 4), width=8, num_endpoints=1)


def test_lanes_that_leave_endpoints_idle_are_refused_with_the_numbers() -> None:
    with pytest.raises(ContractMismatchError, match=r"use 2 endpoint.*num_envs_per_env_runner=16"):
        training(RunnerSpec(2, 8), width=8, num_endpoints=4)


def test_endpoints_that_cannot_be_spread_evenly_are_refused_with_the_remedy() -> None:
    with pytest.raises(ContractMismatchError, match="multiple of 2 endpoints"):
        training(RunnerSpec(2, None), width=1, num_endpoints=3)


def test_endpoints_that_cannot_be_spread_evenly_serve_a_number_of_lanes_that_is_said() -> None:
    share = training(RunnerSpec(2, 12), width=4, num_endpoints=3)

    assert by_runner(share) == [(0, 0, 1), (1, 2, 2)]


def test_new_endpoints_are_as_wide_as_one_session_each_needs() -> None:
    assert num_envs_for(RunnerSpec(2, 8), num_endpoints=4) == 4
    assert num_envs_for(RunnerSpec(2, 8), num_endpoints=1) == 8
    assert num_envs_for(RunnerSpec(2, None), num_endpoints=4) == 1


def test_lanes_that_new_endpoints_cannot_share_are_refused() -> None:
    with pytest.raises(ContractMismatchError, match=r"=9 .* 2 endpoints of a runner"):
        num_envs_for(RunnerSpec(1, 9), num_endpoints=2)


def test_evaluation_runners_have_sessions_of_their_own_with_the_same_endpoints() -> None:
    first, second = assign_sessions(
        RunnerSpec(2, None, num_evaluation_runners=1), width=4, num_endpoints=4
    )

    assert second is not None
    assert second.endpoints_of(1) == (0, 2)
    assert max_sessions_per_endpoint(first, second) == 2


def test_evaluation_runners_have_endpoints_to_themselves() -> None:
    first, second = assign_sessions(
        RunnerSpec(2, None, num_evaluation_runners=2),
        width=4,
        num_endpoints=2,
        num_evaluation_endpoints=2,
    )

    assert second is not None
    assert by_runner(first) == [(0,), (1,)]
    assert by_runner(second) == [(2,), (3,)]
    assert max_sessions_per_endpoint(first, second) == 1


def test_evaluation_has_its_own_number_of_lanes() -> None:
    _, second = assign_sessions(
        RunnerSpec(1, 4, num_evaluation_runners=1, evaluation_lanes=12), width=4, num_endpoints=1
    )

    assert second is not None
    assert second.endpoints_of(0) == (0, 0, 0)


def test_lanes_of_evaluation_that_do_not_come_out_even_are_refused_by_name() -> None:
    runner_spec = RunnerSpec(1, 4, num_evaluation_runners=1, evaluation_lanes=1)

    with pytest.raises(ContractMismatchError, match="in evaluation_config is 1"):
        assign_sessions(runner_spec, width=4, num_endpoints=1)


def test_endpoints_that_evaluation_would_leave_idle_are_refused() -> None:
    runner_spec = RunnerSpec(1, None, num_evaluation_runners=1)

    with pytest.raises(ContractMismatchError, match=r"only 1 session"):
        assign_sessions(runner_spec, width=4, num_endpoints=1, num_evaluation_endpoints=2)


def test_endpoints_for_evaluation_need_an_evaluation() -> None:
    with pytest.raises(ConfigurationError, match="nothing is evaluated"):
        assign_sessions(RunnerSpec(1, None), width=4, num_endpoints=1, num_evaluation_endpoints=1)
