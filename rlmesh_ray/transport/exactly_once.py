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
from collections.abc import Sequence

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.transport.session_progress import EpisodeCounts, SessionProgress

_MOST_AHEAD = 1024
"""Largest distance of a number to skip from the last one that the worker has; memory is limited."""
_MOST_COPY_ATTEMPTS = 10


class ExecutionDecision(enum.Enum):
    """What a worker does with a request that the endpoint has forwarded."""

    EXECUTE = enum.auto()
    RESEND_ANSWER = enum.auto()
    """The worker has executed it, over either transport, and sends the kept answer."""
    REFUSE = enum.auto()
    """Its number is neither the last one nor the next."""


class WorkerSide:
    """The worker's decisions about the requests of one session.

    Args:
        progress: The worker's; at first it has the number before the session's first request.
    """

    def __init__(self, progress: SessionProgress) -> None:
        self.progress = progress
        self.is_direct_open = False
        """Whether steps from the direct connection are executed; else all get FALL_BACK."""

    def decide(self, number: int) -> ExecutionDecision:
        """Return what to do with a request that the endpoint has forwarded."""
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

    Args:
        progress: Progress before the first worker: nothing has begun.
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
        """Note that the request with this number is sent to the worker."""
        self.last_forwarded, self._failed = number, 0

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        """Note a request that the endpoint answers itself; ``take_skips`` returns it later.

        Args:
            number: Number of the request.
            has_failed: Whether it does not count, even if the worker has executed it.
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
        """Note that a reply of the worker is pending."""
        self.is_idle = False

    def reply_received(self) -> None:
        """Note that the worker has replied, after any overdue request, or is dead."""
        self.is_idle = self.is_at_rest = True

    def missed_deadline(self) -> None:
        """Note that a forwarded request is overdue: it has been answered with TIMEOUT."""
        self.is_at_rest = False

    def disconnect_overdue(self, number: int) -> bool:
        """Note that the direct connection was disconnected since its request is overdue.

        The worker is at rest again when it has confirmed the end of the connection.

        Args:
            number: Number of the request.

        Returns:
            Whether it is overdue, finally, and does not count. If not, the worker had finished it
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
        self._last = 0
        self._on_direct = 0

    @property
    def next_number(self) -> int:
        """Number of the next request that is sent."""
        return self._last + 1

    def sent(self) -> None:
        """Note that the next request has been sent, over either transport."""
        self._last += 1

    def sent_direct(self) -> None:
        """Note that the next request has been sent on the direct connection.

        Raises:
            LocalProtocolError: Another one is in flight there.
        """
        if self._on_direct:
            raise LocalProtocolError("a request is in flight on the direct connection already")
        self._last += 1
        self._on_direct = self._last

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
