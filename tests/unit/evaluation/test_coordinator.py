import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlmesh_ray.errors import EndpointLostError
from rlmesh_ray.evaluation.coordinator import Attempt, Coordinator, RemoteEndpoint
from rlmesh_ray.evaluation.result import EndpointRole, EpisodeResult

GONE = EndpointLostError("gone", "a")


class Play:
    """A coordinator with three sessions of three lanes, and a record of their episodes."""

    def __init__(self, indices: range | list[int]) -> None:
        source: Any = lambda: None  # noqa: E731
        self._env: RemoteEndpoint[Any] = RemoteEndpoint(EndpointRole.ENV, source, source)
        self.coordinator = Coordinator(indices, [self._env], [], 30.0, 2**30, lambda _: None)
        self.sessions = [self.session() for _ in range(3)]
        self.finished: list[int] = []
        self.interrupted: list[int] = []

    def session(self, *, has_begun: bool = True) -> Attempt:
        return Attempt({EndpointRole.ENV: self._env}, has_begun=has_begun)

    def take(self, place: int, lane: int) -> None:
        session = self.sessions[place]
        if lane not in session.running:
            self.coordinator.take(session, [lane])

    def finish(self, place: int, lane: int) -> None:
        session = self.sessions[place]
        if lane in session.running:
            index = session.running[lane]
            self.coordinator.finish(session, {lane: EpisodeResult(index, None, 0.0, 1, True)})
            self.finished.append(index)

    def lose(self, place: int, _lane: int = 0) -> None:
        self.coordinator.lose(self.sessions[place], EndpointRole.ENV, GONE)


def test_the_smallest_waiting_index_is_taken_first() -> None:
    play = Play([5, 3, 4])
    (session, *_) = play.sessions

    play.coordinator.take(session, range(4))

    assert session.running == {0: 3, 1: 4, 2: 5}
    assert play.coordinator.num_waiting == 0
    assert not play.coordinator.is_over


def test_unfinished_episodes_of_a_lost_session_wait_again() -> None:
    play = Play(range(4))
    first, second, _ = play.sessions
    play.coordinator.take(first, range(3))
    play.finish(0, 1)

    play.lose(0)

    assert first.running == {}
    play.coordinator.take(second, range(4))
    assert second.running == {0: 0, 1: 2, 2: 3}
    assert [play.coordinator.interruptions[index] for index in range(4)] == [1, 0, 1, 0]


def test_an_episode_that_had_not_begun_is_not_interrupted() -> None:
    play = Play(range(2))
    session = play.session(has_begun=False)
    play.coordinator.take(session, [0])

    play.coordinator.lose(session, EndpointRole.ENV, GONE)

    assert play.coordinator.interruptions[0] == 0


def test_a_late_report_of_a_lost_session_is_refused() -> None:
    play = Play(range(1))
    (session, *_) = play.sessions
    play.coordinator.take(session, [0])
    play.lose(0)

    with pytest.raises(KeyError):
        play.coordinator.finish(session, {0: EpisodeResult(0, None, 0.0, 1, True)})
    assert play.coordinator.num_waiting == 1
    assert not play.coordinator.is_over


MOVES = st.tuples(st.sampled_from([Play.take, Play.finish, Play.lose]), *[st.integers(0, 2)] * 2)


@given(num_episodes=st.integers(1, 12), moves=st.lists(MOVES))
def test_every_index_is_finished_exactly_once_after_any_loss(
    num_episodes: int, moves: list[tuple[Callable[[Play, int, int], None], int, int]]
) -> None:
    play = Play(range(num_episodes))

    for move, place, lane in moves:
        move(play, place, lane)
        num_running = sum(len(session.running) for session in play.sessions)
        left = play.coordinator.num_waiting + num_running
        assert left + len(play.finished) == num_episodes
        assert play.coordinator.is_over == (left == 0)
    # The endpoints that are left can finish the rest.
    while not play.coordinator.is_over:
        for place, lane in itertools.product(range(3), range(3)):
            play.take(place, lane)
            play.finish(place, lane)

    assert sorted(play.finished) == list(range(num_episodes))
