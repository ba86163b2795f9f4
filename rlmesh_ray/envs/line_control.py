"""What an endpoint and its worker both know of the steps that come over a line.

Anonymous memory that no client ever sees. The worker writes here what it begins and what it has
done, so that the endpoint can keep deadlines, say of a request whether it was executed, also
when the worker is dead, and count steps that it never sees.
"""

import mmap
import time

from rlmesh_ray.envs import memory
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, Buckets, num_slots
from rlmesh_ray.protocol.episodes import Tally

_BEGUN, _DONE, _BEGUN_NS, _TIMEOUT_MS, _NUM_ENDED, _NUM_DEVIATIONS = range(6)
_NUM_FIELDS = 6
_WORD_BYTES = 8
_STEPS_AT = _NUM_FIELDS * _WORD_BYTES
_COUNTS_AT = _STEPS_AT + num_slots(DURATION_BOUNDS_NS) * _WORD_BYTES


class LineControl:
    """One side's view.

    Args:
        descriptor: What ``create`` returned; it is mapped, and left to the caller.
        num_lanes: Width of the session.
    """

    def __init__(self, descriptor: int, num_lanes: int) -> None:
        mapped = memoryview(mmap.mmap(descriptor, _size_bytes(num_lanes)))
        rewards_at = _COUNTS_AT + num_lanes * _WORD_BYTES
        flags_at = rewards_at + num_lanes * _WORD_BYTES
        self._fields = mapped[:_STEPS_AT].cast("q")
        self.steps = Buckets(DURATION_BOUNDS_NS, mapped[_STEPS_AT:_COUNTS_AT].cast("q"))
        """How long each step that succeeded over this line has taken, in ns."""
        self.tally = Tally(
            is_tracked=mapped[flags_at : flags_at + num_lanes],
            step_counts=mapped[_COUNTS_AT:rewards_at].cast("q"),
            cumulative_rewards=mapped[rewards_at:flags_at].cast("d"),
        )
        """The account of the session's episodes."""

    @staticmethod
    def create(num_lanes: int) -> int:
        """Return the descriptor of new memory: nothing has begun."""
        return memory.create(_size_bytes(num_lanes))

    @property
    def begun(self) -> int:
        """Number of the last request that the worker has begun."""
        return self._fields[_BEGUN]

    @property
    def is_busy(self) -> bool:
        """Whether the worker is at it still; for ever, if it has died over it."""
        return self._fields[_BEGUN] != self._fields[_DONE]

    @property
    def num_ended(self) -> int:
        """How many lanes were seen to end in those steps."""
        return self._fields[_NUM_ENDED]

    @property
    def num_deviations(self) -> int:
        """How many of their values were out of range, or have truncated an episode."""
        return self._fields[_NUM_DEVIATIONS]

    @property
    def left_s(self) -> float | None:
        """How much time is left for the request in progress; None: it has no deadline."""
        timeout_ms = self._fields[_TIMEOUT_MS]
        if timeout_ms <= 0:
            return None
        return timeout_ms / 1000 - (time.monotonic_ns() - self._fields[_BEGUN_NS]) / 1e9

    @property
    def timeout_ms(self) -> int:
        """How long the request in progress may take; 0: for ever."""
        return self._fields[_TIMEOUT_MS]

    def begin(self, number: int, timeout_ms: int) -> None:
        """Note, before anything is done, that a request is being executed."""
        fields = self._fields
        # Two processes on one machine: the clock is the same.
        fields[_BEGUN_NS], fields[_TIMEOUT_MS] = time.monotonic_ns(), timeout_ms
        fields[_BEGUN] = number

    def count(self, num_ended: int, num_deviations: int = 0) -> None:
        """Count the step in progress, which has succeeded, and what it has brought."""
        fields = self._fields
        self.steps.add(time.monotonic_ns() - fields[_BEGUN_NS])
        if num_ended:
            fields[_NUM_ENDED] += num_ended
        if num_deviations:
            fields[_NUM_DEVIATIONS] += num_deviations

    def end(self) -> None:
        """Note, before it is answered, that the request has been executed."""
        self._fields[_DONE] = self._fields[_BEGUN]


def _size_bytes(num_lanes: int) -> int:
    return _COUNTS_AT + num_lanes * (2 * _WORD_BYTES + 1)
