"""Exactly-once execution of the requests of a session: the rules of each party. Sans-I/O.

Reset, Step, Render and Call are numbered 1, 2, 3 … in each session; Close has no number. A request
takes the Join stream through the endpoint, or a direct connection from client to worker. Each of
the three parties has its class (docs/concepts/exactly_once.md explains the whole):

* ``WorkerSide`` decides what is executed: the number after its last one. It answers the last one
  again with the kept reply and refuses all others, over either transport. On the direct connection
  it answers only successes; for anything else it sends FALL_BACK.
* ``EndpointSide`` decides, finally, that a request is overdue or that the worker is dead. It
  disconnects the direct connection first and then reads whether the request is done. It forwards
  nothing before the worker is at rest again, or killed. For each request that it answers itself, it
  makes the worker skip the number. A new worker starts beyond all numbers of former ones.
* ``ClientSide`` has one request at a time on the direct connection. After FALL_BACK, or when the
  connection ends, the client sends the same number on the Join stream.

The worker alone writes which request it has begun and which are done (``SessionProgress``), in
memory that the endpoint can read, also after the worker's death.
"""

import enum
import math
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.histogram import DURATION_BOUNDS_NS, HistogramCounter, num_counters

_MOST_AHEAD = 1024
"""Largest distance of a number to skip from the last one that the worker has; memory is limited."""
_MOST_COPY_ATTEMPTS = 10
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
    """Request numbers and counts of a session, in ``size_bytes(num_lanes)`` bytes of memory.

    The worker alone writes it; clients have no access. The counts of the episodes exist twice: a
    request writes to one half, while the other half keeps the counts before it. Noting the request
    as done makes its half the current one, so that a worker that dies in between leaves no partial
    counts.
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
        """Number of lanes with a tracked episode; negative: unknown. For the writer."""

    @staticmethod
    def size_bytes(num_lanes: int) -> int:
        return _COUNTS_AT + 2 * _half_bytes(num_lanes)

    @classmethod
    def mapped(cls, descriptor: int, num_lanes: int) -> Self:
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
        lane_steps, num_ended, num_deviations = self._fields[_LANE_STEPS : _NUM_DEVIATIONS + 1]
        return lane_steps, num_ended, num_deviations

    @property
    def timeout_ms(self) -> int:
        """Timeout of the request in progress; 0: none."""
        return self._fields[_TIMEOUT_MS]

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline of the request in progress; infinity without a deadline."""
        timeout_ms = self._fields[_TIMEOUT_MS]
        if timeout_ms <= 0:
            return math.inf
        return timeout_ms / 1000 - (time.monotonic_ns() - self._fields[_BEGUN_NS]) / 1e9

    @property
    def overdue_number(self) -> int:
        """Number of the request in progress if it has missed its deadline, else 0."""
        number = self._fields[_BEGUN]
        is_in_time = self.remaining_s > 0 or self._fields[_DONE] == number
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
        """How many lanes the request in progress has reset, and how many it resets; 0, 0: none."""
        return self._fields[_LANES_RESET], self._fields[_LANES_TO_RESET]

    # --- writing: by the worker alone; ``start`` by the endpoint, between sessions ---------

    def start(
        self, number: int, counts: EpisodeCounts | None = None, former: Self | None = None
    ) -> None:
        """Start with request ``number`` + 1, and with the statistics of a ``former`` worker."""
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
        self._fields[_LANES_RESET], self._fields[_LANES_TO_RESET] = num_reset, num_lanes

    def count_reset(self, lanes: Sequence[int]) -> None:
        """Track episodes in ``lanes`` from the request in progress on; empty: in all."""
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

        The arrays are ``(num_lanes,)``, also where only ``lanes`` were stepped; empty: all were.
        """
        counts = self._counts[self._fields[_BEGUN] % 2]
        tracked, steps, earned = counts.is_tracked, counts.step_counts, counts.cumulative_rewards
        if self._num_tracked < 0:
            self._num_tracked = int(np.count_nonzero(tracked))
        if not self._num_tracked:
            return  # the usual case: episodes that autoresets begin are not tracked
        has_ended = 1 in terminated.tobytes() or 1 in truncated.tobytes()
        if not (has_ended or lanes or self._num_tracked < len(rewards)):
            np.add(steps, 1, out=steps)
            np.add(earned, rewards, out=earned)
            return
        self._num_tracked = -1
        counted = tracked.copy()
        if lanes:
            counted[:] = False
            counted[list(lanes)] = tracked[list(lanes)]
        np.add(steps, counted, out=steps)
        np.add(earned, rewards, out=earned, where=counted)
        np.greater(tracked, counted & (terminated | truncated), out=tracked)

    def count_vector_step(
        self, took_ns: int, num_lanes: int, num_ended: int, num_deviations: int = 0
    ) -> None:
        """Count a successful vector step in the statistics; see ``lane_totals``."""
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


# --- the rules of the three parties ---------------------------------------------------------


class ExecutionDecision(enum.Enum):
    """What a worker does with a request that the endpoint has forwarded."""

    EXECUTE = enum.auto()
    RESEND_ANSWER = enum.auto()
    """The worker has executed it, over either transport, and sends the kept answer."""
    REFUSE = enum.auto()
    """Its number is neither the last one nor the next."""


class WorkerSide:
    """The worker's decisions about the requests of one session."""

    def __init__(self, progress: SessionProgress) -> None:
        self.progress = progress
        self.is_direct_open = False
        """Whether steps from the direct connection are executed; else all get FALL_BACK."""

    def decide(self, number: int) -> ExecutionDecision:
        last = self.progress.begun
        if number == last + 1:
            return ExecutionDecision.EXECUTE
        return ExecutionDecision.RESEND_ANSWER if number == last else ExecutionDecision.REFUSE

    def executes_direct(self, number: int) -> bool:
        """Return whether to execute a step from the direct connection; else answer FALL_BACK."""
        return self.is_direct_open and number == self.progress.begun + 1

    def skip(self, number: int) -> None:
        """Note a request that the endpoint has answered itself as done, without execution."""
        if number == self.progress.begun + 1:
            self.progress.begin(number, 0)
            self.progress.end()


class EndpointSide:
    """The endpoint's decisions about the requests of one session, and the counts of its episodes.

    It is the ``EpisodeCounterSource`` of the session, over all its workers.
    """

    def __init__(self, progress: SessionProgress) -> None:
        self.progress = progress
        self.last_forwarded = 0
        """Number of the last request that was sent to a worker on its channel."""
        self.is_idle = True
        """Whether no reply of the worker is pending."""
        self.is_at_rest = True
        """Whether no overdue request may still be running; else nothing is forwarded."""
        self._last_skipped = self._failed = self._overdue = 0
        self.skipped: frozenset[int] = frozenset()
        """Numbers that the worker has to skip, before the skip is sent."""

    # --- forwarded and skipped numbers ----------------------------------------------------

    @property
    def _reached(self) -> int:
        """The last number that a worker has, over either transport."""
        return max(self.last_forwarded, self.progress.begun)

    def may_start(self, number: int) -> bool:
        """Return whether a new worker may start with this number, beyond all former ones."""
        return number > self._reached

    def start(self, number: int, progress: SessionProgress) -> None:
        """Let a new worker, with this ``progress``, start with request ``number``."""
        progress.start(number - 1, self.after(number - 1), self.progress)
        self.progress = progress
        self._last_skipped = self._failed = 0
        self.skipped = frozenset(one for one in self.skipped if one >= number)

    def forward(self, number: int) -> None:
        self.last_forwarded, self._failed = number, 0

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        """Note a request that the endpoint answers itself; ``take_skips`` returns it later.

        One that has failed does not count, even if the worker has executed it.
        """
        if number <= self._reached + _MOST_AHEAD:  # else the client's numbers are wrong
            self.skipped |= {number}
        if has_failed:
            self._failed = number

    def take_skips(self) -> Sequence[int]:
        """Return the numbers that the worker has to be sent now as skipped, in order.

        Empty while a reply is pending: a later number would make the counts of that request final.
        """
        if not self.skipped or not self.is_idle:
            return ()
        first = last = max(self.progress.done, self._last_skipped)
        while last + 1 in self.skipped:
            last += 1
        if last > first:
            self._last_skipped = last
        self.skipped = frozenset(one for one in self.skipped if one > last)
        return range(first + 1, last + 1)

    def has_reached(self, number: int) -> bool:
        """Return whether all requests up to this number have reached the worker or are skipped."""
        while number in self.skipped:
            number -= 1
        return max(self._reached, self._last_skipped) >= number

    def failed(self, number: int) -> None:
        """Note that a request has failed for the client: its effects do not count."""
        self._failed = number

    # --- counts of the episodes -----------------------------------------------------------

    @property
    def now(self) -> EpisodeCounts:
        """After the last request that has succeeded."""
        progress = self.progress
        done = progress.done
        return progress.counts_after(done - 1 if done == self._failed > 0 else done)

    @property
    def before(self) -> EpisodeCounts:
        """Before the last request."""
        return self.progress.counts_after(self.progress.done - 1)

    def copied_counts(self) -> EpisodeCounts:
        """Return a copy of the counts ``now``, all of one moment although the worker goes on."""
        for _ in range(_MOST_COPY_ATTEMPTS):
            number = self.progress.done
            counts = self.now
            own = EpisodeCounts(
                counts.is_tracked.copy(),
                counts.step_counts.copy(),
                counts.cumulative_rewards.copy(),
            )
            if self.progress.done == number:  # else what was copied may be written to again
                break
        return own

    def after(self, number: int) -> EpisodeCounts:
        """Return the counts after the last request up to ``number`` that has not failed."""
        done = self.progress.done
        if self._failed and done <= self._failed:
            number = min(number, self._failed - 1)
        return self.progress.counts_after(min(number, done))

    # --- replies and deadlines ------------------------------------------------------------

    def command_sent(self) -> None:
        self.is_idle = False

    def reply_received(self) -> None:
        """Note that the worker has replied, after any overdue request, or is dead."""
        self.is_idle = self.is_at_rest = True

    def missed_deadline(self) -> None:
        """Note that a forwarded request is overdue: it has been answered with TIMEOUT."""
        self.is_at_rest = False

    def disconnect_overdue(self, number: int) -> bool:
        """Note that the direct connection was disconnected because its request is overdue.

        The worker is at rest again when it has confirmed the end of the connection. Return whether
        the request is overdue, finally, and does not count. If not, the worker had finished it
        before, and answers it again when the client sends it on the Join stream.
        """
        self.is_at_rest = False
        if self.progress.done >= number:
            return False
        self._overdue = self._failed = number
        return True

    def is_overdue(self, number: int) -> bool:
        """Return whether to answer a request from the Join stream with TIMEOUT.

        It was first sent on the direct connection, and missed its deadline there.
        """
        return number == self._overdue > 0


class ClientSide:
    """The numbers of a client's requests, and the one in flight on the direct connection."""

    def __init__(self) -> None:
        self.next_number = 1
        """Number of the next request."""
        self._on_direct = 0

    def sent(self) -> None:
        """Note that the next request has been sent, over either transport."""
        self.next_number += 1

    def sent_direct(self) -> None:
        """Note that the next request has been sent on the direct connection.

        Raises:
            LocalProtocolError: Another one is in flight there.
        """
        if self._on_direct:
            raise LocalProtocolError("a request is in flight on the direct connection already")
        self._on_direct = self.next_number
        self.next_number += 1

    def direct_answered(self, number: int) -> bool:
        """Note an answer of the direct connection; return whether it has the expected number.

        If not, the client closes the connection, and sends the request on the Join stream.
        """
        is_awaited = number == self._on_direct
        if is_awaited:
            self._on_direct = 0
        return is_awaited

    def fall_back_to_join(self) -> int:
        """Return the number to send on the Join stream, after FALL_BACK or a lost connection."""
        number, self._on_direct = self._on_direct, 0
        return number
