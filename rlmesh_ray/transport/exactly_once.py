"""Exactly-once execution of the requests of one session: what each party decides. Sans-I/O.

Every request that reaches the environment has a number: Reset, Step, Render and Call count up by
one in each session, and Close has none. A request travels by the Join stream and the endpoint, or
by a direct road between client and worker. Each of the three parties has its class here:

* **The worker decides what runs** (``WorkerSide``). It executes the number that follows its last
  one, answers the last one again with the answer that it has kept, and refuses all others,
  whatever road they come by. A direct road is answered only where the request succeeded; for all
  else it says "ask on the Join stream".
* **The endpoint decides one thing** (``EndpointSide``): that a request is overdue, or that the
  worker is dead. That is final. It cuts the direct road first, which no answer passes afterwards,
  and then reads whether the request was done: an answer that left before the cut counts. Nothing
  runs before the worker has confirmed that it is at rest, or has been killed. Of each request that
  the endpoint answers itself, it tells the worker, between two others, to pass over its number. A
  new worker begins beyond all that former ones were given.
* **The client has one request at a time on a direct road** (``ClientSide``). Where that ends, or
  hands the request over, the client sends the same number on the Join stream.

The worker notes what it begins and what it has done where the endpoint can read it, also after the
worker's death (``RequestNumbers``); the worker is the only one that writes there. It notes that a
request is done before it sends the answer, so that a client that reads slowly never looks like an
environment that hangs.
"""

import enum
from collections.abc import Sequence
from typing import Protocol

from rlmesh_ray.errors import LocalProtocolError

_MOST_AHEAD = 1024
"""So far a client's number may be ahead of what its worker was given, to be passed over."""


class RequestNumbers(Protocol):
    """The requests that a worker has begun and done; written by the worker alone."""

    @property
    def begun(self) -> int:
        """Number of the last request that the worker has begun."""

    @property
    def done(self) -> int:
        """Number of the last request that it has finished; equal to ``begun`` between two."""

    def begin(self, number: int, timeout_ms: int) -> None:
        """Note, before anything happens, that a request is executed."""

    def end(self) -> None:
        """Note, before it is answered, that the request is finished."""


class ExecutionDecision(enum.Enum):
    """What a worker does with a request of the Join stream."""

    EXECUTE = enum.auto()
    RESEND_ANSWER = enum.auto()
    """The worker has executed it, by whatever road it came, and sends the kept answer."""
    REFUSE = enum.auto()
    """Its number is none that can come now."""


class WorkerSide:
    """Which requests of one session a worker executes.

    Args:
        numbers: Where it notes what it does; at the number before the session's first request.
    """

    def __init__(self, numbers: RequestNumbers) -> None:
        self._numbers = numbers
        self._is_direct_open = False

    def decide(self, number: int) -> ExecutionDecision:
        """Return what to do with a request that the endpoint has passed on."""
        if number == self._numbers.begun + 1:
            return ExecutionDecision.EXECUTE
        return (
            ExecutionDecision.RESEND_ANSWER
            if number == self._numbers.begun
            else ExecutionDecision.REFUSE
        )

    def executes_direct(self, number: int) -> bool:
        """Tell whether to execute a step that came by a direct road; else it is handed over."""
        return self._is_direct_open and number == self._numbers.begun + 1

    def begin(self, number: int, timeout_ms: int = 0) -> None:
        """Note that the request with this number is executed now."""
        self._numbers.begin(number, timeout_ms)

    def end(self) -> None:
        """Note that it is finished."""
        self._numbers.end()

    def skip(self, number: int) -> None:
        """Note that the endpoint has answered a request itself: the worker does not execute it."""
        if number == self._numbers.begun + 1:
            self._numbers.begin(number, 0)
            self._numbers.end()

    def accept_direct(self) -> None:
        """Execute steps that come by a direct road from now on."""
        self._is_direct_open = True

    def refuse_direct(self) -> None:
        """Hand over all steps that come by a direct road, until ``accept_direct``."""
        self._is_direct_open = False


class EndpointSide:
    """What an endpoint has decided about the requests of one session.

    Args:
        numbers: Of no worker yet: nothing has begun.
    """

    def __init__(self, numbers: RequestNumbers) -> None:
        self._numbers = numbers
        self._last_forwarded = self._last_skipped = self._failed = self._overdue = 0
        # Those that the worker has to pass over, and has not been told of.
        self._skipped: frozenset[int] = frozenset()
        self._is_idle = self._is_at_rest = True

    # --- which numbers the worker has, or passes over -------------------------------------

    @property
    def last_forwarded(self) -> int:
        """Number of the last request that a worker was given on its channel."""
        return self._last_forwarded

    @property
    def _reached(self) -> int:
        """How far a worker has come, on a direct road, too."""
        return max(self._last_forwarded, self._numbers.begun)

    def may_start(self, number: int) -> bool:
        """Tell whether a new worker may begin with this number: no former one has come so far."""
        return number > self._reached

    def start(self, number: int, numbers: RequestNumbers) -> None:
        """Note that a new worker, with these ``numbers``, begins with request ``number``."""
        self._numbers = numbers
        self._last_skipped = self._failed = 0
        self._skipped = frozenset(one for one in self._skipped if one >= number)

    def forward(self, number: int) -> None:
        """Note that the worker is given the request with this number."""
        self._last_forwarded, self._failed = number, 0

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        """Note that the endpoint answers a request itself; the worker has to be told (``tell``).

        Args:
            number: The request's.
            has_failed: Whether it does not count, even if it was done on the direct road.
        """
        if number <= self._reached + _MOST_AHEAD:  # else its client does not count
            self._skipped |= {number}
        if has_failed:
            self._failed = number

    def take_skips(self) -> Sequence[int]:
        """Return which numbers the worker is to be told now to pass over, in order.

        None while it is at a request: a later number would make the counts of that final.
        """
        if not self._skipped or not self._is_idle:
            return ()
        first = last = max(self._numbers.done, self._last_skipped)
        while last + 1 in self._skipped:
            last += 1
        if last > first:
            self._last_skipped = last
        self._skipped = frozenset(one for one in self._skipped if one > last)
        return range(first + 1, last + 1)

    def has_reached(self, number: int) -> bool:
        """Tell whether all requests up to this number have been worked on, or passed over."""
        while number in self._skipped:
            number -= 1
        return max(self._reached, self._last_skipped) >= number

    def failed(self, number: int) -> None:
        """Note that a request has failed for the client: what it does does not count."""
        self._failed = number

    def last_counted(self, number: int) -> int:
        """Return the last request up to ``number`` that is done and counts."""
        done = self._numbers.done
        if self._failed and done <= self._failed:
            number = min(number, self._failed - 1)
        return min(number, done)

    # --- what the worker is busy with -----------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Whether the worker owes no reply."""
        return self._is_idle

    @property
    def is_at_rest(self) -> bool:
        """Whether the worker is not busy with an overdue request; else nothing is forwarded."""
        return self._is_at_rest

    def command_sent(self) -> None:
        """Note that the worker owes a reply."""
        self._is_idle = False

    def reply_received(self) -> None:
        """Note that the worker owes none: it has finished also what was overdue, or is dead."""
        self._is_idle = self._is_at_rest = True

    def missed_deadline(self) -> None:
        """Note that a forwarded request is overdue: it has been answered with TIMEOUT."""
        self._is_at_rest = False

    def disconnect_overdue(self, number: int) -> bool:
        """Note that the direct road was cut because a request on it is late.

        The worker is at rest again when it has confirmed the end of the road.

        Args:
            number: The late request's.

        Returns:
            Whether it is overdue now, and does not count. If not, the worker has finished it before
            the cut, and answers it again when the client asks on the Join stream.
        """
        self._is_at_rest = False
        if self._numbers.done >= number:
            return False
        self._overdue = self._failed = number
        return True

    def is_overdue(self, number: int) -> bool:
        """Tell whether a request that has come on the Join stream is answered with TIMEOUT.

        It came by the direct road and missed its deadline.
        """
        return number == self._overdue > 0


class ClientSide:
    """The numbers of a client's requests, and what it awaits on a direct road."""

    def __init__(self) -> None:
        self._last = 0
        self._on_direct = 0

    @property
    def next_number(self) -> int:
        """Number of the next request that is sent."""
        return self._last + 1

    def sent(self) -> None:
        """Note that the next request has been sent, by whatever road."""
        self._last += 1

    @property
    def on_direct(self) -> int:
        """Number of the request whose answer comes by the direct road; 0: there is none."""
        return self._on_direct

    def sent_direct(self) -> None:
        """Note that the next request has been sent, by the direct road.

        Raises:
            LocalProtocolError: Another one is still to be answered there.
        """
        if self._on_direct:
            raise LocalProtocolError("a request is in flight on the direct road already")
        self._last += 1
        self._on_direct = self._last

    def direct_answered(self, number: int) -> bool:
        """Note an answer of the direct road; return whether it is the awaited one's.

        If not, the road breaks the rules; the client closes it, and asks on the Join stream.
        """
        is_awaited = number == self._on_direct
        if is_awaited:
            self._on_direct = 0
        return is_awaited

    def fall_back_to_join(self) -> int:
        """Return which request to send on the Join stream, since the direct road cannot say more.

        It was handed over, or the road has ended.
        """
        number, self._on_direct = self._on_direct, 0
        return number
