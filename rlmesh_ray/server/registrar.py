"""The registrar of a pool: endpoints dial it, and are in the pool while they stay connected."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rlmesh_ray.auth.pool_tokens import registration_token
from rlmesh_ray.auth.token_store import TokenStore
from rlmesh_ray.errors import CodecError, ConfigurationError, RlmeshError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import pool_membership
from rlmesh_ray.protocol.pool_membership import (
    EndpointIdTable,
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
)
from rlmesh_ray.server.bind_policy import TlsSource
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.event_loop import in_thread
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.statistics import EnvStatistics
from rlmesh_ray.server.statistics_report import parse_report
from rlmesh_ray.wire import registry_v1 as wire

_LOG = logging.getLogger(__name__)

_FIRST_WORD_S = 10.0
_MAX_LOOKS = 32  # each takes a thread
_LONGEST_QUOTE = 80
_REPORTS_APART_S = 1.0


FoundT = TypeVar("FoundT")


class PoolRegistry(Protocol[FoundT]):
    """Where a registrar enters who attends. It is called in threads, and may block.

    What it raises as RlmeshError is told to the endpoint.
    """

    def check(self, endpoint_id: str, address: str) -> FoundT:
        """Look at an endpoint before it is entered; several may be looked at at once.

        Returns:
            What was found, for ``enter``.

        Raises:
            ConfigurationError: It cannot be in the pool as it is.
            RlmeshError: It cannot be in the pool now.
        """

    def enter(self, endpoint_id: str, address: str, found: FoundT) -> int:
        """Put an endpoint into the pool, in place of a former one of that id.

        Never at the same time as another call of this or ``remove``.

        Returns:
            Its incarnation.

        Raises:
            RlmeshError: As ``check`` does; the book is as it was then.
        """

    def remove(self, endpoint_id: str) -> None:
        """Take an endpoint out of the pool; it may come back."""

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Take notice of what an endpoint in the pool tells. In the serving loop, so at once."""


class _RegistrationStream:
    """One stream of an endpoint."""

    def __init__(self) -> None:
        self.arrival = RegistrationRequest("", "", "", 0)
        self.address = ""
        self.is_gone = False
        self.verdict: asyncio.Future[RegistrationRefused] = (
            asyncio.get_running_loop().create_future()
        )
        """Why it is over, if the registrar ends it."""

    def end(self, refusal: RegistrationRefused) -> None:
        """Have the endpoint told that it is out of the pool."""
        if not self.verdict.done():
            self.verdict.set_result(refusal)


class Registrar:
    """Listens for endpoints that register themselves. Usable as a context manager.

    Endpoints are looked at before they are let in; see ``PoolRegistry.check``. It takes 1,024 of
    them, 4 KiB a message, and 10 s for an endpoint to say who it is; those that have become silent
    are missed after 15 s.

    Args:
        pool: The name of the pool.
        registry: Where it enters them.
        address: Where to listen, ``HOST:PORT`` (port 0: a free one).
        secret: Of the pool; what endpoints have to show is derived from it. None: nothing, which
            takes a loopback address.
        tls: Files for TLS.
        max_endpoints: How many may be there at once.

    Raises:
        ConfigurationError: An argument is wrong; the message says which and how to mend it.
    """

    def __init__(
        self,
        pool: str,
        registry: PoolRegistry[Any],
        *,
        address: str = "127.0.0.1:0",
        secret: str | None = None,
        tls: TlsSource | None = None,
        max_endpoints: int = pool_membership.MAX_ENDPOINTS,
    ) -> None:
        self._pool = pool_membership.checked_name(pool, "pool")
        self._registry = registry
        self._id_table: EndpointIdTable[_RegistrationStream] = EndpointIdTable(max_endpoints)
        self._turn = asyncio.Lock()
        self._looks = asyncio.Semaphore(_MAX_LOOKS)
        self._leaving: set[asyncio.Task[None]] = set()
        if secret is not None:
            TokenStore(secret)  # what is derived from it does not show that it is Ray's own
        token = None if secret is None else registration_token(secret)
        self._endpoint = Endpoint(address, token=token, tls=tls, on_stop=_nothing)

    @property
    def address(self) -> str:
        """Where endpoints dial it; only after ``start``."""
        return self._endpoint.address

    @property
    def num_endpoints(self) -> int:
        """How many endpoints are there."""
        return len(self._id_table)

    def start(self) -> Self:
        """Listen.

        Raises:
            AddressError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
        """
        attend = grpc.stream_stream_rpc_method_handler(self._attend)
        handlers = grpc.method_handlers_generic_handler(wire.SERVICE, {"Attend": attend})
        self._endpoint.start([handlers], max_receive_bytes=wire.MAX_REQUEST_BYTES)
        return self

    def health(self) -> Health:
        """Tell whether it would take a new endpoint now."""
        return self._endpoint.health()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def stop(self, grace_s: float = 0.0) -> None:
        """Break off with all endpoints, which try to come back. Idempotent; blocks."""
        self._endpoint.stop(grace_s)

    async def _attend(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        visit = _RegistrationStream()
        # Not a ``finally``: what is suspended when its call breaks off gets there late.
        context.add_done_callback(lambda _context: self._note_end(visit))
        answer = await self._received(visit, requests, context.peer()) or await self._let_in(visit)
        await context.write(wire.pack_registration_reply(answer))
        if isinstance(answer, RegistrationRefused):
            self._tell(visit, answer)
            return
        leaving = asyncio.ensure_future(self._hear(visit, requests))
        ends: set[asyncio.Future[Any]] = {leaving, visit.verdict}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if visit.verdict.done():
            await context.write(wire.pack_registration_reply(visit.verdict.result()))
        # In the stream's own time: whoever has left is out when the stream has ended.
        await asyncio.shield(self._leave(visit))

    async def _received(
        self, visit: _RegistrationStream, requests: AsyncIterator[bytes], peer: str
    ) -> RegistrationRefused | None:
        """Hear who somebody at ``peer`` is; return why that one cannot be let in."""
        try:
            data = await asyncio.wait_for(anext(requests), _FIRST_WORD_S)
            visit.arrival = wire.parse_registration(data)
        except TimeoutError:
            return _not_like_this(f"nothing was said for {_FIRST_WORD_S:g} s")
        except StopAsyncIteration:
            return _not_like_this("nothing was said")
        except CodecError as error:
            return _not_like_this(str(error))
        place = pool_membership.validate_registration(
            visit.arrival, self._pool, pool_membership.peer_host(peer)
        )
        if isinstance(place, RegistrationRefused):
            return place
        visit.address = str(place)
        return self._id_table.conflict(visit.arrival)

    async def _let_in(
        self, visit: _RegistrationStream
    ) -> RegistrationAccepted | RegistrationRefused:
        # What has begun goes on when the stream breaks off: no more are looked at at once than may
        # be, and the book's calls keep their order.
        return await asyncio.shield(self._look_and_enter(visit))

    async def _look_and_enter(
        self, visit: _RegistrationStream
    ) -> RegistrationAccepted | RegistrationRefused:
        try:
            async with self._looks:
                if visit.is_gone:
                    return _GONE
                found = await in_thread(
                    self._registry.check, visit.arrival.endpoint_id, visit.address
                )
            return await self._enter(visit, found)
        except RlmeshError as error:
            return _refusal(error)

    async def _enter(
        self, visit: _RegistrationStream, found: object
    ) -> RegistrationAccepted | RegistrationRefused:
        endpoint_id = visit.arrival.endpoint_id
        async with self._turn:
            # Others have come meanwhile, or this one has gone.
            conflict = self._id_table.conflict(visit.arrival)
            if conflict is not None or visit.is_gone:
                return conflict or _GONE
            incarnation = await in_thread(self._registry.enter, endpoint_id, visit.address, found)
            registered = RegistrationAccepted(incarnation, visit.address)
            former = self._id_table.register(endpoint_id, visit, registered)
            if former is not None:
                former.end(pool_membership.superseded_refusal(endpoint_id, visit.address))
        _LOG.info(
            "%s is in pool %s at %s (incarnation %d, version %r)",
            endpoint_id,
            self._pool,
            visit.address,
            incarnation,
            visit.arrival.version[:_LONGEST_QUOTE],
        )
        return registered

    async def _hear(self, visit: _RegistrationStream, requests: AsyncIterator[bytes]) -> None:
        """Listen to an endpoint in the pool until it ends its side; what makes no sense is left."""
        next_s = 0.0
        frames = aiter(requests)
        while (data := await _next_of(frames)) is not None:
            now_s = asyncio.get_running_loop().time()
            if now_s < next_s or visit.verdict.done():
                continue
            next_s = now_s + _REPORTS_APART_S
            self._note_report(visit, data)

    def _note_report(self, visit: _RegistrationStream, data: bytes) -> None:
        try:
            told = parse_report(data)
        except CodecError:
            return
        try:
            self._registry.note(visit.arrival.endpoint_id, told)
        except Exception:  # noqa: BLE001  # what it has done is no reason to send it away
            _LOG.exception("what an endpoint has done cannot be noted; please report this")

    def _tell(self, visit: _RegistrationStream, refusal: RegistrationRefused) -> None:
        # The others come again every few seconds.
        is_lasting = refusal.kind is RefusalKind.NOT_LIKE_THIS
        _LOG.log(
            logging.WARNING if is_lasting else logging.INFO,
            "%r at %s is not let into pool %s: %s",
            visit.arrival.endpoint_id[:_LONGEST_QUOTE],
            visit.address or "no address",
            self._pool,
            refusal.message,
        )

    def _note_end(self, visit: _RegistrationStream) -> None:
        visit.is_gone = True
        leaving = asyncio.ensure_future(self._leave(visit))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, visit: _RegistrationStream) -> None:
        endpoint_id = visit.arrival.endpoint_id
        async with self._turn:
            if not self._id_table.unregister(endpoint_id, visit):
                return
            try:
                await in_thread(self._registry.remove, endpoint_id)
            except RlmeshError as error:
                _LOG.warning("%s has left pool %s, but %s", endpoint_id, self._pool, error)
            else:
                _LOG.info("%s has left pool %s", endpoint_id, self._pool)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


async def _next_of(frames: AsyncIterator[bytes]) -> bytes | None:
    """Return the next message; None: the endpoint has ended its side."""
    # A call that breaks off ends the iteration by an error, which is an end, too.
    with contextlib.suppress(Exception):
        return await anext(frames)
    return None


def _refusal(error: RlmeshError) -> RegistrationRefused:
    is_lasting = isinstance(error, ConfigurationError)
    return RegistrationRefused(
        RefusalKind.NOT_LIKE_THIS if is_lasting else RefusalKind.NOT_NOW, str(error)
    )


def _not_like_this(message: str) -> RegistrationRefused:
    return RegistrationRefused(RefusalKind.NOT_LIKE_THIS, message)


_GONE = _not_like_this("you have gone")


def _nothing() -> None:
    """End nothing: streams end with their calls."""
