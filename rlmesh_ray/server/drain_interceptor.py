"""The interceptor that counts an endpoint's sessions, and refuses new ones once it drains."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from rlmesh_ray.grpc_setup import grpc

_DRAINING = "draining: this endpoint takes no new sessions, dial another endpoint"

_Handshake = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]
_Join = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


class DrainInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Counts the Join and Process streams of all services; refuses new ones once it is closed.

    To be used in the serving loop only. It stands in front of services that take raw bytes.
    """

    def __init__(self) -> None:
        self._num_sessions = 0
        self._is_closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether new sessions are refused."""
        return self._is_closed

    def close(self) -> None:
        """Refuse new Handshake and Join calls, for good."""
        self._is_closed = True

    async def wait_empty(self, timeout_s: float | None) -> bool:
        """Wait until no session is open; return whether that came in time.

        Args:
            timeout_s: None: as long as it takes.
        """
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        return not self._num_sessions

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Pass the call on; one that opens a session is counted or refused."""
        handler = await continuation(details)
        if handler is None:
            return None
        match details.method.rpartition("/")[2]:
            # A gateway's handlers are streams all of them, and it does not drain.
            case "Handshake" if handler.unary_unary is not None:
                shake_hands = partial(self._handshake, handler.unary_unary)
                return grpc.unary_unary_rpc_method_handler(shake_hands)
            case "Join" | "Process":
                return grpc.stream_stream_rpc_method_handler(
                    partial(self._join, handler.stream_stream)
                )
        return handler

    async def _handshake(
        self, shake_hands: _Handshake, data: bytes, context: grpc.aio.ServicerContext
    ) -> bytes:
        if self._is_closed:
            del data  # see ``error_text.parsed``
            await context.abort(grpc.StatusCode.UNAVAILABLE, _DRAINING)
            raise AssertionError("abort raises")
        answering = shake_hands(data, context)
        del data
        return await answering

    async def _join(
        self, join: _Join, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, _DRAINING)
        self._num_sessions += 1
        self._empty.clear()
        # Not a ``finally``: a coroutine that is suspended when its call breaks off reaches it late.
        context.add_done_callback(self._leave)
        await join(requests, context)

    def _leave(self, _context: object) -> None:
        self._num_sessions -= 1
        if not self._num_sessions:
            self._empty.set()
