"""Availability and retry times of endpoints; without I/O, clock or lock.

Times are seconds of any monotonic clock and come in as arguments.
"""

import math
from dataclasses import dataclass

_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


@dataclass(slots=True)
class _EndpointState:
    num_users: int = 0
    was_reached: bool = False
    is_gone: bool = False
    down_since_s: float | None = None
    num_failures: int = 0
    """In a row."""
    retry_s: float = 0.0
    cause: Exception | None = None


class EndpointAvailability:
    """The endpoints of one role, by index.

    A lost endpoint is tried again after 0.1 s, then 0.2 s, and so on, at most every 5 s, as long as
    another endpoint is in use or the last one has been lost for less than ``patience_s``.

    Args:
        num_endpoints: Number of endpoints, at least 1.
        patience_s: How long to wait for an endpoint when none is left.
        is_known: Whether they have worked before, so that a failure of the first try may pass.
    """

    def __init__(self, num_endpoints: int, patience_s: float, *, is_known: bool = False) -> None:
        self._is_known = is_known
        self._members = [_EndpointState() for _ in range(num_endpoints)]
        self._patience_s = patience_s

    def is_due(self, index: int, now_s: float) -> bool:
        """Return whether endpoint ``index`` may be dialed now."""
        member = self._members[index]
        return not member.is_gone and member.retry_s <= now_s

    def choose(self, now_s: float) -> int | None:
        """Return the endpoint to use next; None where none is due.

        Endpoints that work come before those that failed, then those with the fewest users.
        """
        due = [index for index in range(len(self._members)) if self.is_due(index, now_s)]
        return min(due, key=self._burden, default=None)

    def next_due_s(self, now_s: float) -> float:
        """Return the earliest retry time; infinity where no endpoint waits for one."""
        waiting = [m.retry_s for m in self._members if not m.is_gone and m.retry_s > now_s]
        return min(waiting, default=math.inf)

    def enter(self, index: int) -> None:
        """Count one user more."""
        self._members[index].num_users += 1

    def leave(self, index: int) -> None:
        """Count one user less."""
        self._members[index].num_users -= 1

    def reach(self, index: int) -> None:
        """Record that endpoint ``index`` works."""
        member = self._members[index]
        member.was_reached = True
        member.down_since_s, member.num_failures, member.retry_s = None, 0, 0.0

    def was_reached(self, index: int) -> bool:
        """Return whether endpoint ``index`` has ever worked."""
        return self._is_known or self._members[index].was_reached

    def lose(self, index: int, cause: Exception, now_s: float, *, is_final: bool) -> bool:
        """Record that endpoint ``index`` has failed.

        Several users of one endpoint report the same loss; it delays the next try only once.

        Args:
            index: Index of the endpoint.
            cause: The error.
            now_s: The time.
            is_final: Whether the endpoint cannot be dialed again.

        Returns:
            Whether this is the first report of this loss.
        """
        member = self._members[index]
        is_first = member.down_since_s is None
        if is_first:
            member.down_since_s = now_s
        if is_first or now_s >= member.retry_s:
            delay_s = _FIRST_DELAY_S * 2 ** min(member.num_failures, 10)
            member.retry_s = now_s + min(_LONGEST_DELAY_S, delay_s)
            member.num_failures += 1
        member.cause = cause
        member.is_gone = member.is_gone or is_final
        return is_first

    def has_failed(self, now_s: float) -> bool:
        """Return whether all endpoints are lost for longer than the patience lasts.

        Where none has ever been reached, one try each is enough: the addresses are wrong, or
        no endpoint was started.
        """
        if any(member.num_users or member.down_since_s is None for member in self._members):
            return False
        is_any_known = self._is_known or any(member.was_reached for member in self._members)
        return not is_any_known or all(
            member.is_gone or self._is_overdue(member, now_s) for member in self._members
        )

    def causes(self) -> list[Exception]:
        """Return the error of each lost endpoint."""
        return [
            member.cause
            for member in self._members
            if member.down_since_s is not None and member.cause is not None
        ]

    def _burden(self, index: int) -> tuple[bool, int, int]:
        member = self._members[index]
        return member.down_since_s is not None, member.num_users, index

    def _is_overdue(self, member: _EndpointState, now_s: float) -> bool:
        return member.down_since_s is not None and now_s - member.down_since_s >= self._patience_s
