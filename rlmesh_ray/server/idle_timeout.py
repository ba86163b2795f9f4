"""Clients that say nothing: how long their streams keep their places."""

import asyncio
from collections.abc import AsyncIterator, Callable

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.options import seconds_problem


def checked_idle_timeout(idle_timeout_s: float | None) -> float | None:
    """Return ``idle_timeout_s`` if it is one.

    Raises:
        ConfigurationError: It is no number of seconds above 0.
    """
    problem = "" if idle_timeout_s is None else seconds_problem(idle_timeout_s)
    if problem:
        raise ConfigurationError(f"idle_timeout_s={idle_timeout_s!r} {problem}, or None")
    return idle_timeout_s


class IdleTimeout:
    """Ends a stream whose client says nothing for too long. For the serving loop; one a stream.

    Only the time counts in which the next message is waited for.

    Args:
        timeout_s: How long the client may say nothing; None: as long as it likes.
        is_active: Tells, when the time is up, whether the client has done something else since it
            was asked last, or waits for an answer; then the time begins anew.
    """

    def __init__(
        self, timeout_s: float | None, is_active: Callable[[], bool] = lambda: False
    ) -> None:
        self.has_expired = False
        """Whether the client has been silent for too long."""
        self._timeout_s = timeout_s
        self._is_active = is_active
        self._loop = asyncio.get_running_loop()
        self._since_s = self._loop.time()
        self._reader: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages in ``frames``, which end when the client is silent for too long."""
        if self._timeout_s is None:
            return frames
        self._timer = self._loop.call_later(self._timeout_s, self._look, self._timeout_s)
        return _IdleWatchedFrames(frames, self)

    async def abort_if_expired(self, context: grpc.aio.ServicerContext) -> None:
        """Abort the call if its messages have ended for the client's silence."""
        if self.has_expired:
            reason = (
                f"no request came for {self._timeout_s:g} s, which ends a session here; the "
                "operator can allow more (idle_timeout_s=…, --idle-timeout)"
            )
            await context.abort(grpc.StatusCode.ABORTED, reason)

    def stop(self) -> None:
        """Look no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    async def next_message(self, frames: AsyncIterator[bytes]) -> bytes:
        """Return the next message.

        Raises:
            StopAsyncIteration: There is none, or the client has been silent for too long.
        """
        self._since_s = self._loop.time()
        reader = self._reader = asyncio.current_task()
        try:
            return await anext(frames)
        except asyncio.CancelledError:
            if not self.has_expired or reader is None:
                raise
            # It was ours: whoever reads goes on, behind the last message.
            reader.uncancel()
            raise StopAsyncIteration from None
        finally:
            self._reader = None

    def _look(self, timeout_s: float) -> None:
        now_s = self._loop.time()
        if self._reader is None or self._is_active():
            self._since_s = now_s
        left_s = self._since_s + timeout_s - now_s
        if left_s > 0 or self._reader is None:
            self._timer = self._loop.call_later(left_s, self._look, timeout_s)
            return
        self.has_expired = True
        self._reader.cancel()


class _IdleWatchedFrames:
    """No generator: one that is left in the middle has to be closed, in a task of its own."""

    def __init__(self, frames: AsyncIterator[bytes], idle_timeout: IdleTimeout) -> None:
        self._frames = aiter(frames)
        self._idle_timeout = idle_timeout

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        return await self._idle_timeout.next_message(self._frames)


def change_detector(look: Callable[[], object]) -> Callable[[], bool]:
    """Return what tells whether ``look`` gives something else than when it was asked last."""
    last = look()

    def has_changed() -> bool:
        nonlocal last
        before, last = last, look()
        return last != before

    return has_changed
