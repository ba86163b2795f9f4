"""Watches a worker that is asked past the endpoint: deadlines of steps, and its death."""

import asyncio
from collections.abc import Callable

from rlmesh_ray.transport.session_progress import SessionProgress

_LONGEST_PERIOD_S = 0.25
_SHORTEST_PERIOD_S = 0.005
_PART_OF_TIMEOUT = 0.1


class DeadlineWatch:
    """Looks now and then whether a step is overdue, or the worker is dead. For the serving loop.

    A step that began after a look is noticed at the next one, which is why the period is short
    against the timeout.

    Args:
        progress: Of the session.
        timeout_ms: What the client's steps may take; 0: for ever.
        on_overdue: Called with the number of a step that has missed its deadline; returns whether
            that was the end of the road, and of the watch.
        is_there: Tells whether the worker lives, and the road with it.
        on_end: Called when they do not, at the end of the watch.
    """

    def __init__(
        self,
        progress: SessionProgress,
        timeout_ms: int,
        on_overdue: Callable[[int], bool],
        is_there: Callable[[], bool],
        on_end: Callable[[], None],
    ) -> None:
        self._progress = progress
        self._on_overdue = on_overdue
        self._is_there, self._on_end = is_there, on_end
        self._period_s = _LONGEST_PERIOD_S
        if timeout_ms:
            wanted_s = _PART_OF_TIMEOUT * timeout_ms / 1000
            self._period_s = min(max(wanted_s, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)
        self._timer: asyncio.TimerHandle | None = None
        self._look_again(self._period_s)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        if not self._is_there():
            self._on_end()
            return
        late = self._progress.overdue_number
        if late and self._on_overdue(late):
            return
        left_s = self._progress.remaining_s if self._progress.is_busy else None
        wait_s = self._period_s if left_s is None else min(left_s, self._period_s)
        self._look_again(max(wait_s, _SHORTEST_PERIOD_S))

    def _look_again(self, after_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_s, self._look)
