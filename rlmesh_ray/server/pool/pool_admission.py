"""The registrar of a pool: endpoints connect to it, and are in the pool while connected.

* One registration stream holds an endpoint id at a time: that of the endpoint started last. The
  former holder is refused, immediately and whenever it registers again.
* The end of a stream removes the endpoint from the pool only if the stream still holds the id.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Protocol, Self

from rlmesh_ray.auth.token_file import TokenStore, registration_token
from rlmesh_ray.errors import CodecError, ConfigurationError, RlmeshError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import pool_membership
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
)
from rlmesh_ray.server.endpoint.bind_policy import TlsSource
from rlmesh_ray.server.endpoint.endpoint import Endpoint, Server
from rlmesh_ray.server.endpoint.event_loop import in_thread
from rlmesh_ray.server.observe.observer_service import StatisticsService
from rlmesh_ray.server.observe.statistics import EnvStatistics
from rlmesh_ray.server.observe.statistics_report import observed_statistics, parse_report
from rlmesh_ray.wire import registry_v1 as wire
from rlmesh_ray.wire.observe_v1 import EndpointStatistics

_LOG = logging.getLogger(__name__)

_REQUEST_TIMEOUT_S = 10.0
_MAX_CHECKS = 32  # each takes a thread
_LONGEST_QUOTE = 80
_REPORTS_APART_S = 1.0
_NO_REPORT = EndpointStatistics("", {})


class PoolRegistry(Protocol):
    """Where a registrar enters endpoints. It is called in threads, and may block.

    The first two raise a ConfigurationError for an endpoint that cannot be in the pool as it is,
    another RlmeshError for one that cannot now. The text is sent to the endpoint.
    """

    def check(self, endpoint_id: str, address: str) -> Any:
        """Check an endpoint; return what ``enter`` needs. Several may be checked at a time."""

    def enter(self, endpoint_id: str, address: str, found: Any) -> int:
        """Put an endpoint into the pool, in place of a former one of that id.

        Return its incarnation. Never at the same time as another call of this or ``remove``.
        """

    def remove(self, endpoint_id: str) -> None:
        """Take an endpoint out of the pool; it may come back."""

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Record an endpoint's statistics. Called in the serving loop: it must not block."""


class _RegistrationStream:
    """One registration stream of an endpoint."""

    def __init__(self) -> None:
        self.request = RegistrationRequest("", "", "", 0)
        self.address = ""
        self.incarnation = 0
        self.statistics: EnvStatistics | None = None
        """Its last report."""
        self.is_gone = False
        self.refusal: asyncio.Future[RegistrationRefused] = (
            asyncio.get_running_loop().create_future()
        )
        """Set when another endpoint gets the id, which ends the stream."""


class Registrar(Server):
    """Listens for endpoints that register themselves.

    Endpoints are checked before they are entered. Limits: 1,024 endpoints, 4 KiB a message, 10 s
    until the registration request; silent endpoints are removed after 15 s.

    Args:
        pool: The name of the pool.
        registry: Keeps the endpoints of the pool.
        address: Where to listen, ``HOST:PORT`` (port 0: a free one).
        secret: The pool's secret, from which the token that endpoints send is derived. None: no
            token, which needs a loopback address.
        tls: Files for TLS.
        max_endpoints: Most endpoints at a time.
    """

    def __init__(
        self,
        pool: str,
        registry: PoolRegistry,
        *,
        address: str = "127.0.0.1:0",
        secret: str | None = None,
        tls: TlsSource | None = None,
        max_endpoints: int = pool_membership.MAX_ENDPOINTS,
    ) -> None:
        self._pool = pool_membership.checked_name(pool, "pool")
        self._registry = registry
        self._max_endpoints = max_endpoints
        self._holders: dict[str, _RegistrationStream] = {}
        """The stream that holds each endpoint id."""
        self._turn = asyncio.Lock()
        self._checks = asyncio.Semaphore(_MAX_CHECKS)
        self._leaving: set[asyncio.Task[None]] = set()
        self.num_streams = 0
        """How many registration streams are open, those that wait for their check included."""
        if secret is not None:
            TokenStore(secret)  # refuses Ray's own token, which the derived token would not show
        token = None if secret is None else registration_token(secret)
        self._endpoint = Endpoint(address, token=token, tls=tls, on_stop=lambda: None)

    def start(self) -> Self:
        attend = grpc.stream_stream_rpc_method_handler(self._attend)
        handlers = grpc.method_handlers_generic_handler(wire.SERVICE, {"Attend": attend})
        statistics = StatisticsService(self._members)
        self._endpoint.start(
            [handlers, statistics.handlers()], max_receive_bytes=wire.MAX_REQUEST_BYTES
        )
        return self

    def _members(self) -> list[EndpointStatistics]:
        return [
            replace(
                _NO_REPORT if each.statistics is None else observed_statistics(each.statistics),
                endpoint_id=each.request.endpoint_id,
                address=each.address,
                incarnation=each.incarnation,
            )
            for each in self._holders.values()
        ]

    async def _attend(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        stream = _RegistrationStream()
        self.num_streams += 1
        # Not a ``finally``: what is suspended when its call breaks off gets there late.
        context.add_done_callback(lambda _context: self._note_end(stream))
        answer: RegistrationAccepted | RegistrationRefused | None = await self._received(
            stream, requests, context.peer()
        )
        if answer is None:
            # It continues when the stream breaks off: the number of checks stays limited, and the
            # calls of the registry keep their order.
            answer = await asyncio.shield(self._check_and_enter(stream))
        await context.write(wire.pack_registration_reply(answer))
        if isinstance(answer, RegistrationRefused):
            # Endpoints with another refusal come again every few seconds.
            is_permanent = answer.kind is RefusalKind.NOT_LIKE_THIS
            _LOG.log(
                logging.WARNING if is_permanent else logging.INFO,
                "%r at %s is refused by pool %s: %s",
                stream.request.endpoint_id[:_LONGEST_QUOTE],
                stream.address or "no address",
                self._pool,
                answer.message,
            )
            return
        leaving = asyncio.ensure_future(self._receive_reports(stream, requests))
        ends: set[asyncio.Future[Any]] = {leaving, stream.refusal}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        if stream.refusal.done():
            await context.write(wire.pack_registration_reply(stream.refusal.result()))
        # Before the stream ends: an endpoint that has left is out of the pool then.
        await asyncio.shield(self._leave(stream))

    async def _received(
        self, stream: _RegistrationStream, requests: AsyncIterator[bytes], peer: str
    ) -> RegistrationRefused | None:
        try:
            data = await asyncio.wait_for(anext(requests), _REQUEST_TIMEOUT_S)
            stream.request = wire.parse_registration(data)
            stream.address = str(
                pool_membership.validate_registration(
                    stream.request, self._pool, pool_membership.peer_host(peer)
                )
            )
        except TimeoutError:
            return _not_like_this(f"no registration request came for {_REQUEST_TIMEOUT_S:g} s")
        except StopAsyncIteration:
            return _not_like_this("no registration request came")
        except (CodecError, ConfigurationError) as error:
            return _not_like_this(str(error))
        return self._conflict(stream.request)

    def _conflict(self, request: RegistrationRequest) -> RegistrationRefused | None:
        holder = self._holders.get(request.endpoint_id)
        if holder is None:
            if len(self._holders) < self._max_endpoints:
                return None
            return RegistrationRefused(
                RefusalKind.NOT_NOW,
                f"the pool is full: it has {self._max_endpoints} endpoints; start another pool",
            )
        # The endpoint's own former stream, whose end has not been noticed yet, does not conflict.
        if 0 < request.former_incarnation < holder.incarnation:
            return _superseded(holder)
        return None

    async def _check_and_enter(
        self, stream: _RegistrationStream
    ) -> RegistrationAccepted | RegistrationRefused:
        endpoint_id, address = stream.request.endpoint_id, stream.address
        try:
            async with self._checks:
                if stream.is_gone:
                    return _GONE
                found = await in_thread(self._registry.check, endpoint_id, address)
            async with self._turn:
                # Other endpoints may have come meanwhile, or this one may be gone.
                conflict = self._conflict(stream.request)
                if conflict is not None or stream.is_gone:
                    return conflict or _GONE
                stream.incarnation = await in_thread(
                    self._registry.enter, endpoint_id, address, found
                )
                former = self._holders.get(endpoint_id)
                self._holders[endpoint_id] = stream
        except ConfigurationError as error:
            return _not_like_this(str(error))
        except RlmeshError as error:
            return RegistrationRefused(RefusalKind.NOT_NOW, str(error))
        if former is not None and not former.refusal.done():
            former.refusal.set_result(_superseded(stream))
        _LOG.info(
            "%s is in pool %s at %s (incarnation %d, version %r)",
            endpoint_id,
            self._pool,
            address,
            stream.incarnation,
            stream.request.version[:_LONGEST_QUOTE],
        )
        return RegistrationAccepted(stream.incarnation, address)

    async def _receive_reports(
        self, stream: _RegistrationStream, requests: AsyncIterator[bytes]
    ) -> None:
        """Record the reports of an endpoint until it ends its side; malformed ones are ignored."""
        next_s = 0.0
        # A call that breaks off ends the iteration by an error, which is an end, too.
        with contextlib.suppress(Exception):
            async for data in requests:
                now_s = asyncio.get_running_loop().time()
                if now_s < next_s or stream.refusal.done():
                    continue
                next_s = now_s + _REPORTS_APART_S
                self._note_report(stream, data)

    def _note_report(self, stream: _RegistrationStream, data: bytes) -> None:
        try:
            stream.statistics = statistics = parse_report(data)
        except CodecError:
            return
        try:
            self._registry.note(stream.request.endpoint_id, statistics)
        except Exception:  # noqa: BLE001  # statistics are no reason to end the registration
            _LOG.exception("the statistics of an endpoint cannot be recorded; please report this")

    def _note_end(self, stream: _RegistrationStream) -> None:
        stream.is_gone = True
        self.num_streams -= 1
        leaving = asyncio.ensure_future(self._leave(stream))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def _leave(self, stream: _RegistrationStream) -> None:
        endpoint_id = stream.request.endpoint_id
        async with self._turn:
            if self._holders.get(endpoint_id) is not stream:
                return
            del self._holders[endpoint_id]
            try:
                await in_thread(self._registry.remove, endpoint_id)
            except RlmeshError as error:
                _LOG.warning("%s has left pool %s, but %s", endpoint_id, self._pool, error)
            else:
                _LOG.info("%s has left pool %s", endpoint_id, self._pool)


def _not_like_this(message: str) -> RegistrationRefused:
    return RegistrationRefused(RefusalKind.NOT_LIKE_THIS, message)


def _superseded(holder: _RegistrationStream) -> RegistrationRefused:
    return RegistrationRefused(
        RefusalKind.REPLACED,
        f"another endpoint, at {holder.address}, has registered as "
        f"{holder.request.endpoint_id!r} since; give each endpoint an id of its own",
    )


_GONE = _not_like_this("the endpoint has gone")
