"""What a worker notes of a session."""

import math

import numpy as np

from rlmesh_ray.transport.exactly_once import SessionProgress

REWARDS = np.array([1.0, 2.0, np.nan])
NONE, LAST = np.zeros(3, np.bool_), np.array([False, False, True])


def session() -> SessionProgress:
    progress = SessionProgress.local(3)
    progress.begin(1, 0)
    progress.count_reset([0, 1])
    progress.end()
    return progress


def test_only_tracked_lanes_are_counted() -> None:
    progress = session()
    progress.begin(2, 0)
    progress.count_step(REWARDS, LAST, NONE)
    progress.end()

    counts = progress.counts_after(2)
    assert counts.step_counts.tolist() == [1, 1, 0]
    assert counts.cumulative_rewards.tolist() == [1.0, 2.0, 0.0]
    assert counts.is_tracked.tolist() == [True, True, False]


def test_lanes_that_are_not_stepped_stay_as_they_are() -> None:
    progress = session()
    progress.begin(2, 0)
    progress.count_step(REWARDS, NONE, np.ones(3, np.bool_), [1])
    progress.end()

    counts = progress.counts_after(2)
    assert counts.step_counts.tolist() == [0, 1, 0]
    assert counts.is_tracked.tolist() == [True, False, False]


def test_a_step_that_was_never_done_has_counted_nothing() -> None:
    progress = session()
    progress.begin(2, 0)
    progress.count_step(REWARDS, NONE, NONE)  # and its worker dies

    assert progress.is_busy
    assert progress.counts_after(progress.done).step_counts.tolist() == [0, 0, 0]


def test_another_worker_goes_on_with_the_counts_of_the_former_one() -> None:
    former, other = session(), SessionProgress.local(3)
    former.begin(2, 0)
    former.count_step(REWARDS, NONE, NONE)
    former.end()

    other.start(7, former.counts_after(2))

    assert (other.begun, other.done) == (7, 7)
    assert other.counts_after(7).step_counts.tolist() == [1, 1, 0]
    assert other.counts_after(7).is_tracked.tolist() == [True, True, False]


def test_a_request_in_progress_is_known_with_its_deadline() -> None:
    progress = session()
    progress.begin(2, 1000)

    assert (progress.begun, progress.is_busy) == (2, True)
    assert 0.0 < progress.remaining_s <= 1.0
    progress.end()
    assert not progress.is_busy
    progress.begin(3, 0)
    assert progress.remaining_s == math.inf


def test_a_step_that_begins_during_the_check_of_the_one_before_it_is_not_overdue() -> None:
    class Overtaken(SessionProgress):
        @property
        def remaining_s(self) -> float:
            self.end()
            self.begin(2, 60_000)
            return -0.001

    progress = Overtaken.local(1)
    progress.begin(1, 1)

    assert progress.overdue_number == 0
