import pytest

from rlmesh_ray.client.evaluation.roster import Roster
from rlmesh_ray.errors import EndpointLostError

GONE = EndpointLostError("gone", "a")


def at_work(num_endpoints: int, patience_s: float = 30.0) -> Roster:
    """A roster whose endpoints have all been reached."""
    roster = Roster(num_endpoints, patience_s)
    for place in range(num_endpoints):
        roster.reach(place)
    return roster


def test_users_are_spread_evenly() -> None:
    roster = Roster(3, 30.0)
    chosen = []
    for _ in range(6):
        place = roster.choose(0.0)
        assert place is not None
        roster.enter(place)
        chosen.append(place)
    roster.leave(1)

    assert chosen == [0, 1, 2, 0, 1, 2]
    assert roster.choose(0.0) == 1


def test_an_endpoint_that_is_up_comes_before_one_that_may_be() -> None:
    roster = at_work(2)
    roster.enter(1)
    roster.lose(0, GONE, 0.0, is_final=False)

    assert roster.choose(1.0) == 1


def test_a_lost_endpoint_is_tried_again_later_and_later() -> None:
    roster = at_work(1)
    now_s = 0.0
    delays_s = []
    for _ in range(9):
        roster.lose(0, GONE, now_s, is_final=False)
        assert not roster.is_due(0, now_s)
        assert roster.choose(now_s) is None
        due_s = roster.next_due_s(now_s)
        delays_s.append(due_s - now_s)
        now_s = due_s
        assert roster.is_due(0, now_s)

    assert delays_s == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0])


def test_several_users_of_one_endpoint_report_one_loss() -> None:
    roster = at_work(1)

    news = [roster.lose(0, GONE, 0.0, is_final=False) for _ in range(3)]

    assert news == [True, False, False]
    assert roster.next_due_s(0.0) == pytest.approx(0.1)


def test_an_endpoint_that_is_back_starts_with_short_delays_again() -> None:
    roster = at_work(1)
    for now_s in (0.0, 1.0, 2.0):
        roster.lose(0, GONE, now_s, is_final=False)
    roster.reach(0)

    assert roster.lose(0, GONE, 10.0, is_final=False)
    assert roster.next_due_s(10.0) == pytest.approx(10.1)


def test_a_session_that_cannot_be_opened_again_is_never_due() -> None:
    roster = at_work(2)
    roster.lose(0, GONE, 0.0, is_final=True)

    assert not roster.is_due(0, 1e9)
    assert roster.choose(1e9) == 1
    assert roster.next_due_s(0.0) == float("inf")


def test_there_is_hope_while_anybody_is_at_work() -> None:
    roster = at_work(2)
    roster.enter(1)
    roster.lose(0, GONE, 0.0, is_final=False)

    assert not roster.is_hopeless(1e9)


def test_there_is_hope_until_patience_ends() -> None:
    roster = at_work(2, patience_s=30.0)
    roster.lose(0, GONE, 0.0, is_final=False)
    roster.lose(1, GONE, 10.0, is_final=False)

    assert not roster.is_hopeless(39.0)
    assert roster.is_hopeless(40.0)
    assert roster.causes() == [GONE, GONE]


def test_there_is_no_hope_where_none_can_be_opened_again() -> None:
    roster = at_work(1)
    roster.lose(0, GONE, 0.0, is_final=True)

    assert roster.is_hopeless(0.0)


def test_one_try_each_is_enough_where_none_was_ever_reached() -> None:
    roster = Roster(2, 30.0)
    roster.lose(0, GONE, 0.0, is_final=False)
    assert not roster.is_hopeless(0.0)

    roster.lose(1, GONE, 0.0, is_final=False)

    assert roster.is_hopeless(0.0)


def test_endpoints_that_have_worked_before_deserve_patience_at_the_first_try() -> None:
    roster = Roster(1, 30.0, is_known=True)
    roster.lose(0, GONE, 0.0, is_final=False)

    assert roster.was_reached(0)
    assert not roster.is_hopeless(29.0)
    assert roster.is_hopeless(30.0)
