import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.evaluation.coordinator import Schedule


def test_the_smallest_waiting_index_is_taken_first() -> None:
    schedule = Schedule([5, 3, 4])

    assert [schedule.take("a", lane) for lane in range(4)] == [3, 4, 5, None]
    assert schedule.num_waiting == 0
    assert not schedule.is_complete


def test_unfinished_episodes_of_a_lost_session_wait_again() -> None:
    schedule = Schedule(range(4))
    for lane in range(3):
        schedule.take("a", lane)
    assert schedule.finish("a", 1) == 1

    assert schedule.lose("a") == (0, 2)

    assert [schedule.take("b", lane) for lane in range(4)] == [0, 2, 3, None]
    assert [schedule.interruptions(index) for index in range(4)] == [1, 0, 1, 0]


def test_an_episode_that_had_not_begun_is_not_interrupted() -> None:
    schedule = Schedule(range(2))
    schedule.take("a", 0)

    assert schedule.lose("a", has_begun=False) == (0,)

    assert schedule.interruptions(0) == 0


def test_a_late_report_of_a_lost_session_is_refused() -> None:
    schedule = Schedule(range(1))
    schedule.take("a", 0)
    schedule.lose("a")

    with pytest.raises(LocalProtocolError, match="runs no episode"):
        schedule.finish("a", 0)


def test_a_lane_runs_one_episode_at_a_time() -> None:
    schedule = Schedule(range(2))
    schedule.take("a", 0)

    with pytest.raises(LocalProtocolError, match="still runs episode 0"):
        schedule.take("a", 0)


class Play:
    """Three sessions of three lanes, and a record of their episodes.

    Args:
        schedule: What they take from.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._generations = [0, 0, 0]
        self._running: dict[tuple[int, int], dict[int, int]] = {}
        self.finished: list[int] = []

    @property
    def num_running(self) -> int:
        return sum(map(len, self._running.values()))

    def take(self, place: int, lane: int) -> None:
        session, own = self._session(place)
        index = None if lane in own else self._schedule.take(session, lane)
        if index is not None:
            own[lane] = index

    def finish(self, place: int, lane: int) -> None:
        session, own = self._session(place)
        if lane in own:
            assert self._schedule.finish(session, lane) == own[lane]
            self.finished.append(own.pop(lane))

    def lose(self, place: int, _lane: int) -> None:
        session, own = self._session(place)
        assert self._schedule.lose(session) == tuple(sorted(own.values()))
        self._running.pop(session)
        self._generations[place] += 1

    def _session(self, place: int) -> tuple[tuple[int, int], dict[int, int]]:
        session = (place, self._generations[place])
        return session, self._running.setdefault(session, {})


MOVES = st.tuples(st.sampled_from([Play.take, Play.finish, Play.lose]), *[st.integers(0, 2)] * 2)


@given(num_episodes=st.integers(1, 12), moves=st.lists(MOVES))
def test_every_index_is_finished_exactly_once_after_any_loss(
    num_episodes: int, moves: list[tuple[Callable[[Play, int, int], None], int, int]]
) -> None:
    schedule = Schedule(range(num_episodes))
    play = Play(schedule)

    for move, place, lane in moves:
        move(play, place, lane)
        left = schedule.num_waiting + play.num_running
        assert left + len(play.finished) == num_episodes
        assert schedule.is_complete == (left == 0)
    # The endpoints that are left can finish the rest.
    while not schedule.is_complete:
        for place, lane in itertools.product(range(3), range(3)):
            play.take(place, lane)
            play.finish(place, lane)

    assert sorted(play.finished) == list(range(num_episodes))
