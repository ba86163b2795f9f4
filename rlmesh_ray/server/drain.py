"""Draining: an endpoint refuses new sessions, and stops without leaving a request unanswered."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

from rlmesh_ray.grpc_setup import grpc

DRAINING = "draining: this endpoint takes no new sessions, dial another endpoint"
"""The refusal of a new session."""

_Handshake = Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]
_Join = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


class Drain:
    """Counts the pending requests of an endpoint. To be used in the serving loop only.

    Rule: once ``is_draining``, a session takes at most one request more, and ends when it has
    answered all that it took.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self._is_draining = False
        self._settled = asyncio.Event()
        self._preparations: list[Callable[[], Awaitable[None]]] = []

    def add_preparation(self, preparation: Callable[[], Awaitable[None]]) -> None:
        """Await ``preparation`` before the drain ends, for work that is not counted as requests."""
        self._preparations.append(preparation)

    @property
    def is_draining(self) -> bool:
        """Whether the endpoint is about to stop."""
        return self._is_draining

    def begin_request(self) -> None:
        """Note that a request was taken."""
        self._num_pending += 1

    def end_request(self, count: int = 1) -> None:
        """Note that ``count`` requests were answered, or that their clients are gone."""
        self._num_pending -= count
        self._settle_if_done()

    @contextlib.contextmanager
    def request_in_progress(self) -> Iterator[None]:
        """Count one pending request within the context."""
        self.begin_request()
        try:
            yield
        finally:
            self.end_request()

    async def run(self) -> None:
        """Stop taking new requests, and wait until all pending ones are answered."""
        self._is_draining = True
        with self.request_in_progress():
            await asyncio.gather(*(preparation() for preparation in self._preparations))
        await self._settled.wait()

    def _settle_if_done(self) -> None:
        if self._is_draining and not self._num_pending:
            self._settled.set()


class DrainInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Counts the sessions of an endpoint; refuses new ones once it is closed.

    Those of gRPC are the Join and Process streams of all services; a further port counts its own.

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
            await context.abort(grpc.StatusCode.UNAVAILABLE, DRAINING)
            raise AssertionError("abort raises")
        answering = shake_hands(data, context)
        del data
        return await answering

    async def _join(
        self, join: _Join, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        if self._is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, DRAINING)
        self.note_begun()
        # Not a ``finally``: a coroutine that is suspended when its call breaks off reaches it late.
        context.add_done_callback(lambda _context: self.note_ended())
        await join(requests, context)

    def note_begun(self) -> None:
        """Count a session that begins."""
        self._num_sessions += 1
        self._empty.clear()

    def note_ended(self) -> None:
        """Count a session that has ended."""
        self._num_sessions -= 1
        if not self._num_sessions:
            self._empty.set()
