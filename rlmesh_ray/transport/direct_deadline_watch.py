"""DirectDeadlineWatch: the endpoint's timer for steps on a direct connection."""

import asyncio
from collections.abc import Callable

from rlmesh_ray.transport.session_progress import SessionProgress

_LONGEST_PERIOD_S = 0.25
_SHORTEST_PERIOD_S = 0.005
_PART_OF_TIMEOUT = 0.1


class DirectDeadlineWatch:
    """Checks periodically for an overdue step and for the worker's death. For the serving loop.

    A step that begins after a check is seen at the next one; so the period is a fraction of the
    timeout.

    Args:
        progress: The session's progress.
        timeout_ms: Timeout of the client's steps; 0: none.
        on_overdue: Called with the number of an overdue step; returns whether the connection, and
            so the watch, has ended.
        is_connected: Returns whether the worker and the connection are alive.
        on_end: Called when they are not; the watch ends.
        on_busy: Called at each check while a step is in progress.
    """

    def __init__(
        self,
        progress: SessionProgress,
        timeout_ms: int,
        on_overdue: Callable[[int], bool],
        is_connected: Callable[[], bool],
        on_end: Callable[[], None],
        on_busy: Callable[[], None] = lambda: None,
    ) -> None:
        self._progress = progress
        self._on_overdue = on_overdue
        self._is_connected, self._on_end, self._on_busy = is_connected, on_end, on_busy
        self._period_s = _LONGEST_PERIOD_S
        if timeout_ms:
            wanted_s = _PART_OF_TIMEOUT * timeout_ms / 1000
            self._period_s = min(max(wanted_s, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)
        self._timer: asyncio.TimerHandle | None = None
        self._schedule(self._period_s)

    def stop(self) -> None:
        """Stop checking. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        if not self._is_connected():
            self._on_end()
            return
        overdue = self._progress.overdue_number
        if overdue and self._on_overdue(overdue):
            return
        remaining_s = None
        if self._progress.is_busy:
            self._on_busy()
            remaining_s = self._progress.remaining_s
        wait_s = self._period_s if remaining_s is None else min(remaining_s, self._period_s)
        self._schedule(max(wait_s, _SHORTEST_PERIOD_S))

    def _schedule(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._check)
