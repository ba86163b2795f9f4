"""What a worker has begun and done in one session, in memory that its endpoint reads, too.

The worker alone writes here. The endpoint keeps deadlines by it, counts steps that never pass it,
and reports episodes, also when the worker is dead. No client ever sees this memory.

The counts of the episodes exist twice. A request writes to one half, and the other one keeps what
was true before it: to note that a request is done is what makes its counts the present ones, so
that a worker that dies in between leaves nothing half counted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.histogram import DURATION_BOUNDS_NS, HistogramCounter, num_counters

_BEGUN, _DONE, _BEGUN_NS, _TIMEOUT_MS, _LANE_STEPS, _NUM_ENDED, _NUM_DEVIATIONS = range(7)
_NUM_FIELDS = 7
_WORD_BYTES = 8
_STEPS_AT = _NUM_FIELDS * _WORD_BYTES
_COUNTS_AT = _STEPS_AT + num_counters(DURATION_BOUNDS_NS) * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """Counts of the tracked episodes at one moment; all are ``(num_lanes,)``."""

    is_tracked: NDArray[np.bool_]
    step_counts: NDArray[np.int64]
    cumulative_rewards: NDArray[np.float64]


class SessionProgress:
    """One process's view of the progress of a session.

    Args:
        memory: ``size_bytes(num_lanes)`` bytes, zeros at first.
        num_lanes: Width of the session.
    """

    def __init__(self, memory: memoryview, num_lanes: int) -> None:
        self._memory = memory
        self._fields = memory[:_STEPS_AT].cast("q")
        self.steps = HistogramCounter(DURATION_BOUNDS_NS, memory[_STEPS_AT:_COUNTS_AT].cast("q"))
        """How long each step that succeeded has taken in the worker, in ns."""
        half = _half_bytes(num_lanes)
        self._halves = tuple(memory[_COUNTS_AT + at : _COUNTS_AT + at + half] for at in (0, half))
        self._counts = tuple(_counts(half, num_lanes) for half in self._halves)
        self._num_tracked = -1
        """The writer's: how many lanes have a tracked episode; below 0: to be counted."""

    @staticmethod
    def size_bytes(num_lanes: int) -> int:
        """Return how much memory the progress of ``num_lanes`` lanes takes."""
        return _COUNTS_AT + 2 * _half_bytes(num_lanes)

    @classmethod
    def local(cls, num_lanes: int) -> "SessionProgress":
        """Return one in memory of this process alone."""
        return cls(memoryview(bytearray(cls.size_bytes(num_lanes))), num_lanes)

    # --- reading --------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """Number of the last request that the worker has begun."""
        return self._fields[_BEGUN]

    @property
    def done(self) -> int:
        """Number of the last request that it has finished; equal to ``begun`` between two."""
        return self._fields[_DONE]

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress; for ever, if the worker has died over it."""
        return self._fields[_BEGUN] != self._fields[_DONE]

    @property
    def num_lane_steps(self) -> int:
        """Steps of single lanes."""
        return self._fields[_LANE_STEPS]

    @property
    def num_ended(self) -> int:
        """Episodes that were seen to end."""
        return self._fields[_NUM_ENDED]

    @property
    def num_deviations(self) -> int:
        """Values that were out of range, or have truncated an episode."""
        return self._fields[_NUM_DEVIATIONS]

    @property
    def timeout_ms(self) -> int:
        """How long the request in progress may take; 0: for ever."""
        return self._fields[_TIMEOUT_MS]

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline of the request in progress; None: it has none."""
        timeout_ms = self._fields[_TIMEOUT_MS]
        if timeout_ms <= 0:
            return None
        return timeout_ms / 1000 - (time.monotonic_ns() - self._fields[_BEGUN_NS]) / 1e9

    @property
    def overdue_number(self) -> int:
        """Number of the request in progress if it has missed its deadline; 0: there is none."""
        number = self._fields[_BEGUN]
        left_s = self.remaining_s
        is_over = left_s is None or left_s > 0 or self._fields[_DONE] == number
        # The worker may have gone on to another one, in time, while this was read.
        return 0 if is_over or self._fields[_BEGUN] != number else number

    @property
    def elapsed_ns(self) -> int:
        """Since the request in progress has begun."""
        return time.monotonic_ns() - self._fields[_BEGUN_NS]

    def counts_after(self, number: int) -> EpisodeCounts:
        """Return the counts after request ``number``: the last one, or the one before that."""
        return self._counts[number % 2]

    @property
    def now(self) -> EpisodeCounts:
        """The counts after the last request that was begun; for who steps the lanes."""
        return self._counts[self._fields[_BEGUN] % 2]

    @property
    def before(self) -> EpisodeCounts:
        """The counts before that request."""
        return self._counts[1 - self._fields[_BEGUN] % 2]

    # --- writing: the worker alone, and before there is one its endpoint ------------------

    def start(self, number: int, counts: EpisodeCounts | None = None) -> None:
        """Begin a session with request ``number`` + 1, and with the counts of a former worker."""
        self._memory[:] = bytes(len(self._memory))
        self._num_tracked = -1
        self._fields[_BEGUN] = self._fields[_DONE] = number
        if counts is not None:
            own = self._counts[number % 2]
            own.is_tracked[:] = counts.is_tracked
            own.step_counts[:] = counts.step_counts
            own.cumulative_rewards[:] = counts.cumulative_rewards

    def invalidate_counts(self) -> None:
        """Take notice that the other process has called ``start``."""
        self._num_tracked = -1

    def begin(self, number: int, timeout_ms: int) -> None:
        """Note, before anything is done, that a request is executed."""
        fields = self._fields
        self._halves[number % 2][:] = self._halves[1 - number % 2]
        # Two processes on one machine: the clock is the same.
        fields[_BEGUN_NS], fields[_TIMEOUT_MS] = time.monotonic_ns(), timeout_ms
        fields[_BEGUN] = number

    def count_reset(self, lanes: Sequence[int]) -> None:
        """Count in the request in progress that episodes begin in ``lanes``; empty: in all."""
        counts = self.now
        where: Any = list(lanes) if lanes else ...
        counts.step_counts[where] = 0
        counts.cumulative_rewards[where] = 0.0
        counts.is_tracked[where] = True
        self._num_tracked = -1

    def count_step(
        self,
        rewards: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        lanes: Sequence[int] = (),
    ) -> None:
        """Count in the episodes the step in progress, which has succeeded.

        Args:
            rewards: ``(num_lanes,)``.
            terminated: ``(num_lanes,)``.
            truncated: ``(num_lanes,)``.
            lanes: Those that were stepped; empty: all.
        """
        counts = self.now
        if self._num_tracked < 0:
            self._num_tracked = int(np.count_nonzero(counts.is_tracked))
        if not self._num_tracked:
            return  # mostly: what an autoreset begins is not tracked
        has_ended = 1 in terminated.tobytes() or 1 in truncated.tobytes()
        if has_ended or lanes or self._num_tracked < len(rewards):
            self._count_some(counts, rewards, terminated | truncated, lanes)
            return
        np.add(counts.step_counts, 1, out=counts.step_counts)
        np.add(counts.cumulative_rewards, rewards, out=counts.cumulative_rewards)

    def _count_some(
        self,
        counts: EpisodeCounts,
        rewards: NDArray[np.float64],
        has_ended: NDArray[np.bool_],
        lanes: Sequence[int],
    ) -> None:
        self._num_tracked = -1
        tracked, steps, earned = counts.is_tracked, counts.step_counts, counts.cumulative_rewards
        counted = tracked.copy()
        if lanes:
            counted[:] = False
            counted[list(lanes)] = tracked[list(lanes)]
        np.add(steps, counted, out=steps)
        np.add(earned, rewards, out=earned, where=counted)
        np.greater(tracked, counted & has_ended, out=tracked)

    def count_vector_step(
        self, took_ns: int, num_lanes: int, num_ended: int, num_deviations: int = 0
    ) -> None:
        """Count a vector step that has succeeded.

        Args:
            took_ns: How long it took.
            num_lanes: How many lanes it stepped.
            num_ended: In how many of them an episode has ended.
            num_deviations: How many values were out of range, or have truncated an episode.
        """
        fields = self._fields
        self.steps.add(took_ns)
        fields[_LANE_STEPS] += num_lanes
        if num_ended:
            fields[_NUM_ENDED] += num_ended
        if num_deviations:
            fields[_NUM_DEVIATIONS] += num_deviations

    def end(self) -> None:
        """Note, before it is answered, that the request is finished."""
        self._fields[_DONE] = self._fields[_BEGUN]


def _half_bytes(num_lanes: int) -> int:
    size = num_lanes * (2 * _WORD_BYTES + 1)
    return -(-size // _WORD_BYTES) * _WORD_BYTES


def _counts(memory: memoryview, num_lanes: int) -> EpisodeCounts:
    rewards_at, flags_at = num_lanes * _WORD_BYTES, 2 * num_lanes * _WORD_BYTES
    return EpisodeCounts(
        is_tracked=np.frombuffer(memory, np.bool_, num_lanes, flags_at),
        step_counts=np.frombuffer(memory, np.int64, num_lanes),
        cumulative_rewards=np.frombuffer(memory, np.float64, num_lanes, rewards_at),
    )
