import pytest

from rlmesh_ray.errors import (
    AccessDeniedError,
    ContractMismatchError,
    EndpointLostError,
    EndpointUnreachableError,
    RemoteEnvError,
    RlmeshError,
)
from rlmesh_ray.rllib.patience import Patience

AWAY = EndpointUnreachableError("nothing answers there", "host:1")
RAISED = RemoteEnvError("INTERNAL", "ValueError: worn out", is_recoverable=False)


def test_the_first_new_try_comes_at_once_and_later_ones_a_second_apart_at_most() -> None:
    patience = Patience()

    delays = [patience.failed(AWAY, now_s=100.0) for _ in range(6)]

    assert delays == [0.0, 0.25, 0.5, 1.0, 1.0, 1.0]


def test_an_endpoint_may_stay_away_for_a_while_but_not_for_ever() -> None:
    patience = Patience(give_up_after_s=60.0)

    assert patience.failed(AWAY, now_s=100.0) is not None
    assert patience.failed(AWAY, now_s=159.0) is not None
    assert patience.failed(AWAY, now_s=161.0) is None


def test_an_endpoint_may_stay_away_for_ever_while_others_do_the_work() -> None:
    patience = Patience(give_up_after_s=60.0)
    patience.failed(AWAY, now_s=0.0)

    assert patience.failed(AWAY, now_s=10_000.0, others_work=True) is not None
    assert patience.failed(AWAY, now_s=10_000.0) is None


def test_success_restores_all_patience() -> None:
    patience = Patience(give_up_after_s=60.0)
    patience.failed(AWAY, now_s=100.0)
    patience.succeeded()

    assert patience.failed(AWAY, now_s=500.0) == 0.0
    assert patience.num_failures == 1


def test_an_environment_that_raises_is_tried_ten_times_whatever_time_that_takes() -> None:
    patience = Patience(give_up_after_s=1.0)

    delays = [patience.failed(RAISED, now_s=float(100 * number)) for number in range(11)]

    assert None not in delays[:10]
    assert delays[10] is None


def test_steps_that_succeed_give_an_environment_that_raises_no_more_tries() -> None:
    patience = Patience()

    delays = []
    for number in range(11):
        patience.succeeded()
        delays.append(patience.failed(RAISED, now_s=float(number)))

    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays[10] is None
    assert patience.num_raised == 11


def test_an_episode_that_is_finished_gives_an_environment_all_tries_again() -> None:
    patience = Patience()
    for _ in range(10):
        patience.failed(RAISED, now_s=0.0)
    patience.finished_episode()

    assert patience.failed(RAISED, now_s=0.0) == 0.0


def test_discarded_episodes_are_too_many_after_ten_in_each_lane_whatever_steps_succeed() -> None:
    patience = Patience(num_lanes=2)
    for _ in range(20):
        assert patience.discarded(1) is False
        patience.succeeded()

    assert patience.discarded(1) is True
    assert patience.num_discarded == 21


def test_an_episode_that_is_finished_forgives_the_discarded_ones() -> None:
    patience = Patience()
    assert patience.discarded(10) is False
    patience.finished_episode()

    assert patience.discarded(10) is False
    assert patience.discarded(1) is True


def test_errors_of_an_environment_and_discarded_episodes_count_together() -> None:
    patience = Patience(num_lanes=4)
    for _ in range(5):
        assert patience.failed(RAISED, now_s=0.0) is not None  # that costs all lanes an episode
    assert patience.discarded(20) is False

    assert patience.failed(RAISED, now_s=0.0) is None


def test_losses_and_errors_in_turns_do_not_go_on_for_ever() -> None:
    patience = Patience(give_up_after_s=1000.0)
    errors = [RAISED, EndpointLostError("the session broke", "host:1")] * 10

    delays = [patience.failed(error, now_s=0.0) for error in errors]

    assert None not in delays
    assert patience.failed(RAISED, now_s=0.0) is None


def test_a_long_absence_takes_no_try_from_an_environment_that_raises() -> None:
    patience = Patience(give_up_after_s=1000.0)
    for second in range(30):
        patience.failed(AWAY, now_s=float(second))

    assert patience.failed(RAISED, now_s=30.0) is not None


@pytest.mark.parametrize(
    "error",
    [AccessDeniedError("no such token", "host:1"), ContractMismatchError("another width")],
)
def test_what_would_end_the_same_is_not_tried_again(error: RlmeshError) -> None:
    assert Patience().failed(error, now_s=0.0) is None
