import pytest

from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.evaluation.endpoint_availability import EndpointAvailability

GONE = EndpointLostError("gone", "a")


def at_work(num_endpoints: int, patience_s: float = 30.0) -> EndpointAvailability:
    """Availability of endpoints that have all been reached."""
    availability = EndpointAvailability(num_endpoints, patience_s)
    for place in range(num_endpoints):
        availability.reach(place)
    return availability


def test_users_are_spread_evenly() -> None:
    availability = EndpointAvailability(3, 30.0)
    chosen = []
    for _ in range(6):
        place = availability.choose(0.0)
        assert place is not None
        availability.enter(place)
        chosen.append(place)
    availability.leave(1)

    assert chosen == [0, 1, 2, 0, 1, 2]
    assert availability.choose(0.0) == 1


def test_a_working_endpoint_comes_before_one_that_failed() -> None:
    availability = at_work(2)
    availability.enter(1)
    availability.lose(0, GONE, 0.0, is_final=False)

    assert availability.choose(1.0) == 1


def test_a_lost_endpoint_is_tried_again_later_and_later() -> None:
    availability = at_work(1)
    now_s = 0.0
    delays_s = []
    for _ in range(9):
        availability.lose(0, GONE, now_s, is_final=False)
        assert not availability.is_due(0, now_s)
        assert availability.choose(now_s) is None
        due_s = availability.next_due_s(now_s)
        delays_s.append(due_s - now_s)
        now_s = due_s
        assert availability.is_due(0, now_s)

    assert delays_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_several_users_of_one_endpoint_report_one_loss() -> None:
    availability = at_work(1)

    news = [availability.lose(0, GONE, 0.0, is_final=False) for _ in range(3)]

    assert news == [True, False, False]
    assert availability.next_due_s(0.0) == pytest.approx(0.1)


def test_after_a_recovery_delays_are_short_again() -> None:
    availability = at_work(1)
    for now_s in (0.0, 1.0, 2.0):
        availability.lose(0, GONE, now_s, is_final=False)
    availability.reach(0)

    assert availability.lose(0, GONE, 10.0, is_final=False)
    assert availability.next_due_s(10.0) == pytest.approx(10.1)


def test_a_session_that_cannot_be_opened_again_is_never_due() -> None:
    availability = at_work(2)
    availability.lose(0, GONE, 0.0, is_final=True)

    assert not availability.is_due(0, 1e9)
    assert availability.choose(1e9) == 1
    assert availability.next_due_s(0.0) == float("inf")


def test_the_endpoints_have_not_failed_while_one_is_in_use() -> None:
    availability = at_work(2)
    availability.enter(1)
    availability.lose(0, GONE, 0.0, is_final=False)

    assert not availability.has_failed(1e9)


def test_the_endpoints_have_failed_when_patience_ends() -> None:
    availability = at_work(2, patience_s=30.0)
    availability.lose(0, GONE, 0.0, is_final=False)
    availability.lose(1, GONE, 10.0, is_final=False)

    assert not availability.has_failed(39.0)
    assert availability.has_failed(40.0)
    assert availability.causes() == [GONE, GONE]


def test_the_endpoints_have_failed_where_none_can_be_opened_again() -> None:
    availability = at_work(1)
    availability.lose(0, GONE, 0.0, is_final=True)

    assert availability.has_failed(0.0)


def test_one_try_each_is_enough_where_none_was_ever_reached() -> None:
    availability = EndpointAvailability(2, 30.0)
    availability.lose(0, GONE, 0.0, is_final=False)
    assert not availability.has_failed(0.0)

    availability.lose(1, GONE, 0.0, is_final=False)

    assert availability.has_failed(0.0)


def test_known_endpoints_get_patience_at_the_first_try() -> None:
    availability = EndpointAvailability(1, 30.0, is_known=True)
    availability.lose(0, GONE, 0.0, is_final=False)

    assert availability.was_reached(0)
    assert not availability.has_failed(29.0)
    assert availability.has_failed(30.0)
