"""Idle timeout of a stream."""

import asyncio
from collections.abc import AsyncIterator, Callable

from rlmesh_ray.grpc_setup import grpc


class IdleTimeout:
    """Ends a stream whose client sends nothing for too long. For the serving loop; one per stream.

    Only the time counts in which the stream waits for the next message.

    Args:
        timeout_s: How long the client may send nothing; None: without limit.
        is_active: Returns, when the time is up, whether the client has done something else since
            the previous call, or waits for an answer; then the time begins anew.
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
        self._frames: AsyncIterator[bytes]
        self._reader: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages in ``frames``, which end when the client is silent for too long."""
        if self._timeout_s is None:
            return frames
        self._timer = self._loop.call_later(self._timeout_s, self._check, self._timeout_s)
        self._frames = aiter(frames)
        return self

    async def abort_if_expired(self, context: grpc.aio.ServicerContext) -> None:
        if self.has_expired:
            reason = (
                f"no request came for {self._timeout_s:g} s, which ends a session here; the "
                "operator can allow more (idle_timeout_s of ListenOptions, --idle-timeout)"
            )
            await context.abort(grpc.StatusCode.ABORTED, reason)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # Not a generator: an abandoned one is closed in a separate task.
    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        self._since_s = self._loop.time()
        reader = self._reader = asyncio.current_task()
        try:
            return await anext(self._frames)
        except asyncio.CancelledError:
            if not self.has_expired or reader is None:
                raise
            # The timer cancelled the reader: it goes on as after the last message.
            reader.uncancel()
            raise StopAsyncIteration from None
        finally:
            self._reader = None

    def _check(self, timeout_s: float) -> None:
        now_s = self._loop.time()
        if self._reader is None or self._is_active():
            self._since_s = now_s
        left_s = self._since_s + timeout_s - now_s
        if left_s > 0 or self._reader is None:
            self._timer = self._loop.call_later(left_s, self._check, timeout_s)
            return
        self.has_expired = True
        self._reader.cancel()
