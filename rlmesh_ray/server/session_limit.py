"""The limits of an endpoint's sessions: ``max_sessions``, and its process's file descriptors."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Collection

from rlmesh_ray.errors import CapacityError
from rlmesh_ray.grpc_setup import grpc

_FEWEST_SPARE, _MOST_SPARE = 4, 64
"""Descriptors that stay free, to accept connections that are refused, and to read files."""
_SPARE_SHARE = 16
RAISE_LIMITS = "close a session, or have the endpoint's operator allow more (ulimit -n)"
"""The remedy where descriptors are short."""


def require_descriptors(count: int) -> None:
    """Make sure that this process can open ``count`` descriptors, and a few more.

    Raises:
        CapacityError: It cannot.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        num_open = len(os.listdir("/dev/fd")) - 1  # without the one that reads the folder
    except FileNotFoundError:
        return
    except OSError:  # none is left to read the folder with
        num_open = limit
    spare = min(max(limit // _SPARE_SHARE, _FEWEST_SPARE), _MOST_SPARE)
    if num_open + count + spare > limit:
        raise CapacityError(
            f"the endpoint has {num_open} of {limit} file descriptors open, and another session "
            f"needs more than that leaves: {RAISE_LIMITS}"
        )


@contextlib.asynccontextmanager
async def refusing_when_full(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Abort the call with RESOURCE_EXHAUSTED where the block raises CapacityError."""
    try:
        yield
    except CapacityError as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)


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

    def refuse(self) -> None:
        """Give a place back, and count the session as refused."""
        self.num_sessions -= 1
        self._note_refused()

    def release(self) -> None:
        """Give a place back."""
        self.num_sessions -= 1
