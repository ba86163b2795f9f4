"""SessionProgress: request numbers and counts of a session, in memory shared with the endpoint.

The worker alone writes it. The endpoint reads it for deadlines, for the counts of steps on direct
connections, and for the records of episodes, also after the worker's death. Clients have no access.

The counts of the episodes exist twice: a request writes to one half, while the other half keeps the
counts before it. Noting the request as done makes its half the current one, so that a worker that
dies in between leaves no partial counts.
"""

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.histogram import DURATION_BOUNDS_NS, HistogramCounter, num_counters

_BEGUN, _DONE, _BEGUN_NS, _TIMEOUT_MS, _LANE_STEPS, _NUM_ENDED, _NUM_DEVIATIONS = range(7)
_LANES_RESET, _LANES_TO_RESET, _NUM_FIELDS = range(7, 10)
_WORD_BYTES = 8
_STEPS_AT = _NUM_FIELDS * _WORD_BYTES
_STATISTICS_AT = _LANE_STEPS * _WORD_BYTES
_COUNTS_AT = _STEPS_AT + num_counters(DURATION_BOUNDS_NS) * _WORD_BYTES


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """Counts of the tracked episodes at one moment; all are ``(num_lanes,)``."""

    is_tracked: NDArray[np.bool_]
    step_counts: NDArray[np.int64]
    cumulative_rewards: NDArray[np.float64]


class SessionProgress:
    """View of the progress of a session.

    Args:
        memory: ``size_bytes(num_lanes)`` bytes, zeros at first.
        num_lanes: Width of the session.
    """

    def __init__(self, memory: memoryview, num_lanes: int) -> None:
        self.memory = memory
        self._fields = memory[:_STEPS_AT].cast("q")
        self.steps = HistogramCounter(DURATION_BOUNDS_NS, memory[_STEPS_AT:_COUNTS_AT].cast("q"))
        """Durations in ns of the successful steps in the worker."""
        half = _half_bytes(num_lanes)
        self._halves = tuple(memory[_COUNTS_AT + at : _COUNTS_AT + at + half] for at in (0, half))
        self._counts = tuple(_counts(half, num_lanes) for half in self._halves)
        self._num_tracked = -1
        """Cache of the writer: number of lanes with a tracked episode; negative: unknown."""

    @staticmethod
    def size_bytes(num_lanes: int) -> int:
        return _COUNTS_AT + 2 * _half_bytes(num_lanes)

    @classmethod
    def mapped(cls, descriptor: int, num_lanes: int) -> Self:
        """Return the progress in memory of ``size_bytes(num_lanes)``, which processes share."""
        return cls(memoryview(mmap.mmap(descriptor, cls.size_bytes(num_lanes))), num_lanes)

    @classmethod
    def local(cls, num_lanes: int) -> Self:
        return cls(memoryview(bytearray(cls.size_bytes(num_lanes))), num_lanes)

    # --- reading --------------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """Number of the last request that the worker has begun."""
        return self._fields[_BEGUN]

    @property
    def done(self) -> int:
        """Number of the last request that it has finished; equal to ``begun`` between requests."""
        return self._fields[_DONE]

    @property
    def is_busy(self) -> bool:
        """Whether a request is in progress; it stays True if the worker died during one."""
        return self._fields[_BEGUN] != self._fields[_DONE]

    @property
    def lane_totals(self) -> tuple[int, int, int]:
        """Stepped lanes, ended episodes, and values that were out of range or truncated one."""
        fields = self._fields
        return fields[_LANE_STEPS], fields[_NUM_ENDED], fields[_NUM_DEVIATIONS]

    @property
    def timeout_ms(self) -> int:
        """Timeout of the request in progress; 0: none."""
        return self._fields[_TIMEOUT_MS]

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the deadline of the request in progress; None without a deadline."""
        timeout_ms = self._fields[_TIMEOUT_MS]
        if timeout_ms <= 0:
            return None
        return timeout_ms / 1000 - (time.monotonic_ns() - self._fields[_BEGUN_NS]) / 1e9

    @property
    def overdue_number(self) -> int:
        """Number of the request in progress if it has missed its deadline, else 0."""
        number = self._fields[_BEGUN]
        remaining_s = self.remaining_s
        is_in_time = remaining_s is None or remaining_s > 0 or self._fields[_DONE] == number
        # The worker may have begun the next request between the reads.
        return 0 if is_in_time or self._fields[_BEGUN] != number else number

    @property
    def elapsed_ns(self) -> int:
        return time.monotonic_ns() - self._fields[_BEGUN_NS]

    def counts_after(self, number: int) -> EpisodeCounts:
        """Return the counts after request ``number``: the last one, or the one before that."""
        return self._counts[number % 2]

    @property
    def now(self) -> EpisodeCounts:
        """The counts after the last begun request, which the worker is writing."""
        return self._counts[self._fields[_BEGUN] % 2]

    @property
    def before(self) -> EpisodeCounts:
        """The counts before the last begun request."""
        return self._counts[1 - self._fields[_BEGUN] % 2]

    @property
    def resets(self) -> tuple[int, int]:
        """How many lanes the request in progress has reset, and how many it resets in all.

        Both are 0 for a step that resets none, as far as is known.
        """
        return self._fields[_LANES_RESET], self._fields[_LANES_TO_RESET]

    # --- writing: by the worker alone; ``start`` by the endpoint, between sessions ---------

    def start(
        self, number: int, counts: EpisodeCounts | None = None, former: Self | None = None
    ) -> None:
        """Start a session with request ``number`` + 1.

        Args:
            number: Number of the last request.
            counts: The counts of the episodes by then.
            former: Progress of the worker before, whose statistics continue.
        """
        self.memory[:] = bytes(len(self.memory))
        if former is not None:
            self.memory[_STATISTICS_AT:_COUNTS_AT] = former.memory[_STATISTICS_AT:_COUNTS_AT]
        self._num_tracked = -1
        self._fields[_BEGUN] = self._fields[_DONE] = number
        if counts is not None:
            own = self._counts[number % 2]
            own.is_tracked[:] = counts.is_tracked
            own.step_counts[:] = counts.step_counts
            own.cumulative_rewards[:] = counts.cumulative_rewards

    def begin(self, number: int, timeout_ms: int) -> None:
        """Note a request as begun, before its execution."""
        fields = self._fields
        self._halves[number % 2][:] = self._halves[1 - number % 2]
        # Processes of one machine share the monotonic clock.
        fields[_BEGUN_NS], fields[_TIMEOUT_MS] = time.monotonic_ns(), timeout_ms
        fields[_LANES_RESET] = fields[_LANES_TO_RESET] = 0
        fields[_BEGUN] = number

    def note_resets(self, num_reset: int, num_lanes: int) -> None:
        """Note how many lanes the request in progress has reset by now, of how many."""
        self._fields[_LANES_RESET], self._fields[_LANES_TO_RESET] = num_reset, num_lanes

    def count_reset(self, lanes: Sequence[int]) -> None:
        """Start tracking episodes in ``lanes`` with the request in progress; empty: in all."""
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
        """Add the step in progress, which has succeeded, to the counts of the episodes.

        Args:
            rewards: ``(num_lanes,)``.
            terminated: ``(num_lanes,)``.
            truncated: ``(num_lanes,)``.
            lanes: The stepped lanes; empty: all.
        """
        counts = self._counts[self._fields[_BEGUN] % 2]
        if self._num_tracked < 0:
            self._num_tracked = int(np.count_nonzero(counts.is_tracked))
        if not self._num_tracked:
            return  # the usual case: episodes that autoresets begin are not tracked
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
        """Count a successful vector step in the statistics.

        Args:
            took_ns: Duration of the step.
            num_lanes: Number of stepped lanes.
            num_ended: Number of ended episodes.
            num_deviations: Number of values that were out of range, or truncated an episode.
        """
        fields = self._fields
        self.steps.add(took_ns)
        fields[_LANE_STEPS] += num_lanes
        if num_ended:
            fields[_NUM_ENDED] += num_ended
        if num_deviations:
            fields[_NUM_DEVIATIONS] += num_deviations

    def end(self) -> None:
        """Note the request as done, before its answer is sent."""
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
