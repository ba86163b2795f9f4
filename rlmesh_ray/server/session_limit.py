"""The limit ``max_sessions`` of an environment endpoint."""

import asyncio
from collections.abc import Callable, Collection

from rlmesh_ray.errors import CapacityError


class SessionLimit:
    """Counts the places of open sessions, and refuses sessions beyond the limit.

    Args:
        max_sessions: Most sessions at a time.
        note_refused: Called for each session that is refused.
    """

    def __init__(self, max_sessions: int, note_refused: Callable[[], None]) -> None:
        self._max_sessions = max_sessions
        self._note_refused = note_refused
        self.num_sessions = 0
        """Places that are taken."""

    async def reserve(self, leaving: Collection[asyncio.Task[None]], timeout_s: float) -> None:
        """Take a place; wait for one of the sessions that are just ``leaving`` if there is none.

        Raises:
            CapacityError: All places are taken.
        """
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while self.num_sessions >= self._max_sessions and leaving:
            left_s = deadline_s - asyncio.get_running_loop().time()
            if left_s <= 0:
                break
            await asyncio.wait(leaving, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        if self.num_sessions >= self._max_sessions:
            self._note_refused()
            raise CapacityError(
                f"all {self._max_sessions} sessions are taken; close one, or serve the "
                "environment from a factory or id with a larger max_sessions"
            )
        self.num_sessions += 1

    def release(self) -> None:
        """Give a place back."""
        self.num_sessions -= 1
