"""One address for many endpoints, which may come, go and move.

Each connection of a client has its own connection to an endpoint. So an endpoint sees its clients
as if they had come directly: limits per connection, and what some protocols remember of one, are
each client's own, and no client waits for another's large message.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from rlmesh_ray.auth.token_file import ServerToken, bearer_value
from rlmesh_ray.compat.grpc import message_writer
from rlmesh_ray.errors import (
    AddressError,
    CodecError,
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.grpc_setup import channel_options, grpc, keep_in_forks
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.capabilities import (
    AUTHORIZATION_METADATA_KEY,
    GATEWAY_METADATA_KEY,
    SESSION_METADATA_KEY,
)
from rlmesh_ray.protocol.gateway_balancer import GatewayBalancer, Target
from rlmesh_ray.server.endpoint.bind_policy import TlsSource
from rlmesh_ray.server.endpoint.calls import clipped, refuse, text_of
from rlmesh_ray.server.endpoint.endpoint import Endpoint, Server
from rlmesh_ray.server.endpoint.event_loop import in_thread, shared_loop
from rlmesh_ray.server.endpoint.gate import refusing_when_full, require_descriptors
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.wire import health_v1
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

Entry = tuple[str, str | bytes]
"""A key of a call's metadata, and its value."""

PERIOD_S = 2.0
"""How often the endpoints are listed, and their health checked."""
_CONNECT_S = 3.0  # before another endpoint is tried
_CHECK_S = 2.0
_NOTICE_S = 0.2
# An endpoint's connection outlives its client's by so much: gRPC does not report when one closes.
_IDLE_S = 5.0
_CLOSE_S = 5.0
# It reaches clients in metadata, which must stay below 8 KiB.
_MOST_OBSTACLE_CHARACTERS = 500

# Metadata of one of the two connections; gRPC writes its own for the other.
_HOP_BY_HOP = frozenset({"content-type", "host", "user-agent"})
_AGAIN = "dial the gateway again"
_REFUSED = (
    "the endpoint behind this gateway does not take the gateway's token: its port may have gone to "
    f"another one; {_AGAIN}"
)
_READY = grpc.ChannelConnectivity.READY
_FAILED = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


class GatewayServer(Server, grpc.ServiceRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Forwards every call of every protocol, unparsed, to one of several endpoints.

    When an endpoint is gone, the calls there end with UNAVAILABLE; the gateway repeats none of
    them. The connection's next call goes to another endpoint, unless it names a session: that has
    gone, too.

    Args:
        find: Returns the endpoints that take new connections; called in a thread, may block.
        address: ``HOST:PORT``; port 0 lets the system choose.
        token: The token of the clients; the gateway sends each endpoint that endpoint's own.
        tls: Files for TLS with the clients.
        endpoint_credentials: Returns TLS credentials for a connection to an endpoint; None: plain
            text.
        service: Full name of the endpoints' service, for requests for its health.
        max_receive_bytes: Size of the largest request to forward.

    Raises:
        AddressError: ``address`` is malformed, a unix socket, or needs a token.
        ConfigurationError: ``token`` is nothing that a call can carry, or a file cannot be used.
    """

    def __init__(
        self,
        find: Callable[[], Sequence[Target]],
        *,
        address: str = "127.0.0.1:0",
        token: ServerToken = None,
        tls: TlsSource | None = None,
        endpoint_credentials: Callable[[], grpc.ChannelCredentials] | None = None,
        service: str = "",
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if parse_address(address).path:
            raise AddressError(
                f"a gateway cannot listen on {address}: connections of a unix socket have no "
                "names to tell them apart; use HOST:PORT"
            )
        self._find = find
        self._credentials = endpoint_credentials
        self._service = service
        self._max_receive_bytes = max_receive_bytes
        # The rest belongs to the serving loop.
        self._balancer = GatewayBalancer()  # names a client's connection as gRPC does
        self._checking: asyncio.Task[None] | None = None
        self._listing: asyncio.Task[None] | None = None
        self._obstacle = ""
        """Why the last listing failed."""
        self._health = Health(False, "its endpoints have not been asked yet")
        """As of the last check. A gateway serves while one of its endpoints does."""
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            on_stop=self._close,
            probe=lambda: self._health,
            kind="gateway",
        )

    def start(self) -> Self:
        """Look for endpoints, then listen. Blocks until clients can connect.

        Raises:
            ListenError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
        """
        self._endpoint.require_new()
        try:
            shared_loop().run(self._begin_checks())
            self._endpoint.start([self], max_receive_bytes=self._max_receive_bytes)
        except BaseException:
            self._close()
            raise
        return self

    def service_name(self) -> str:
        return self._service

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler that forwards a call; on the wire all kinds of calls are streams."""
        if details.method.startswith(f"/{health_v1.SERVICE}/"):
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, details.method))

    # --- calls -----------------------------------------------------------------------------------

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        connection, metadata = context.peer(), context.invocation_metadata() or ()
        is_bound = any(key == SESSION_METADATA_KEY for key, _ in metadata)
        try:
            async with refusing_when_full(context):
                target, channel = await self._route(connection, is_bound=is_bound)
        except (EndpointUnreachableError, ConfigurationError) as error:
            await refuse(context, grpc.StatusCode.UNAVAILABLE, str(error))
        state = self._balancer.begin(connection, target, time.monotonic())
        call = channel.stream_stream(method)(
            timeout=context.time_remaining(), metadata=_shown_to(target, metadata)
        )
        sending = asyncio.ensure_future(_send(requests, call))
        try:
            await _receive(call, context)
            code, details = await call.code(), await call.details() or ""
            trailing = _passed_on(await call.trailing_metadata() or ())
        finally:
            # Also when the client has gone: the endpoint's session must end.
            sending.cancel()
            call.cancel()
            self._balancer.end(state, time.monotonic())
        context.set_trailing_metadata(trailing)
        if code is not grpc.StatusCode.OK:
            failure = await self._failure(connection, target, channel, code, details)
            await refuse(context, *failure)

    async def _failure(
        self,
        connection: str,
        target: Target,
        channel: grpc.aio.Channel,
        code: grpc.StatusCode,
        details: str,
    ) -> tuple[grpc.StatusCode, str]:
        """Note what a call's error says of its endpoint; return the error for the client."""
        unavailable = grpc.StatusCode.UNAVAILABLE
        if code is grpc.StatusCode.UNAUTHENTICATED:  # the client's token is not to blame
            self._note_lost(connection, target)
            return unavailable, _REFUSED
        if code is grpc.StatusCode.CANCELLED:  # the client would take it for its own
            return unavailable, f"the call was ended behind the gateway; {_AGAIN}"
        if code is unavailable:
            if await _has_gone(channel):
                self._note_lost(connection, target)
                return code, f"the endpoint behind the gateway has gone ({details}); {_AGAIN}"
            # The endpoint itself returned this: it drains, or stops.
            self._balancer.fail(target, time.monotonic())
        return code, details

    async def _route(self, connection: str, *, is_bound: bool) -> tuple[Target, grpc.aio.Channel]:
        """Return the endpoint for a call of ``connection``, and a channel that is connected to it.

        Nothing of the call has been sent yet, so that another endpoint may be tried, unless the
        call is bound to a session of one. Errors have texts for the client.
        """
        former = self._balancer.target_of(connection, time.monotonic(), is_bound=is_bound)
        if former is not None and (channel := await self._connected(connection)):
            return former, channel
        if is_bound:
            raise EndpointUnreachableError(
                f"the endpoint that knows this session has gone from behind the gateway; {_AGAIN}"
            )
        tried: set[Target] = set()
        for may_list in (True, False):
            while target := self._balancer.choose(connection, time.monotonic(), without=tried):
                if channel := await self._connected(connection):
                    _LOG.info("%s goes to endpoint %s", connection, target.endpoint_id)
                    return target, channel
                tried.add(target)
            if may_list:  # one may have come, or have moved, since the last check
                await self._list()
        if tried:
            raise EndpointUnreachableError(
                f"none of the {len(tried)} endpoints behind this gateway answers; {_AGAIN} when "
                "they are back"
            )
        raise EndpointUnreachableError(
            f"there is no endpoint behind this gateway now{self._obstacle}; {_AGAIN} when there is "
            "one"
        )

    async def _connected(self, connection: str) -> grpc.aio.Channel | None:
        """Return a channel to the endpoint that a connection has; None: that cannot be reached."""
        state = self._balancer.connections[connection]
        if state.channel is None:
            require_descriptors(1)
            state.channel = self._open(state.target)
        channel = state.channel
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONNECT_S):
                while (now := channel.get_state(try_to_connect=True)) not in _FAILED:
                    if now is _READY:
                        return channel
                    await channel.wait_for_state_change(now)
        self._note_lost(connection, state.target)
        return None

    def _open(self, target: Target) -> grpc.aio.Channel:
        options = channel_options()  # the two ends limit the size of messages
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(target.address, options=options)
        else:
            channel = grpc.aio.secure_channel(target.address, self._credentials(), options=options)
        return keep_in_forks(channel)

    def _note_lost(self, connection: str, target: Target) -> None:
        _LOG.info("endpoint %s at %s has gone", target.endpoint_id, target.address)
        self._balancer.fail(target, time.monotonic())
        self._balancer.leave(connection, target)

    # --- endpoints -------------------------------------------------------------------------------

    async def _list(self) -> None:
        """List the endpoints, one list at a time; one that comes late counts for later calls."""
        if self._listing is None or self._listing.done():
            self._listing = asyncio.ensure_future(self._renew())
        await asyncio.wait({self._listing}, timeout=3 * PERIOD_S)

    async def _renew(self) -> None:
        try:
            self._balancer.renew(await in_thread(self._find))
            self._obstacle = ""
        except Exception as error:  # noqa: BLE001  # what finds them may raise anything
            # Those that are known are probably still there.
            text = clipped(text_of(error), _MOST_OBSTACLE_CHARACTERS)
            self._obstacle = f" ({type(error).__name__}: {text})"
            _LOG.warning("the endpoints behind the gateway cannot be listed%s", self._obstacle)

    async def _begin_checks(self) -> None:
        await self._check_endpoints()
        self._checking = asyncio.ensure_future(self._keep_checking())

    async def _keep_checking(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self._check_endpoints()
            except Exception as error:  # noqa: BLE001  # no thread, say; the next check may succeed
                _LOG.exception("the endpoints behind the gateway cannot be asked")
                self._health = Health(False, f"its endpoints cannot be asked: {error}")

    async def _check_endpoints(self) -> None:
        """List all endpoints, and ask for their health.

        New connections avoid those that do not serve.
        """
        await self._list()
        await self._close_channels(_IDLE_S)
        self._balancer.forget_idle(time.monotonic())
        targets = self._balancer.targets
        reasons = await asyncio.gather(*(self._ask(target) for target in targets))
        for target, reason in zip(targets, reasons, strict=True):
            if reason:
                self._balancer.fail(target, time.monotonic())
        if not reasons:
            self._health = Health(False, "there is no endpoint behind this gateway now")
        elif all(reasons):
            none = f"none of the {len(reasons)} endpoints behind this gateway serves ({reasons[0]})"
            self._health = Health(False, none)
        else:
            self._health = Health(True)

    async def _ask(self, target: Target) -> str:
        """Ask an endpoint for its health; return why it does not serve, empty if it does."""
        request, metadata = health_v1.pack_request(), _shown_to(target, ())
        try:
            # A connection of its own, as a new client has; those of clients must become idle.
            async with self._open(target) as channel:
                check = channel.unary_unary(health_v1.CHECK)
                answer = await check(request, timeout=_CHECK_S, metadata=metadata)
            status = health_v1.parse_response(answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ""  # it has no health service, but it answers
            return f"{error.code().name}: {error.details()}"
        except (CodecError, ConfigurationError) as error:
            return str(error)
        return "it says so" if status == health_v1.NOT_SERVING else ""

    async def _close_channels(self, idle_s: float) -> None:
        """Close channels without a call for ``idle_s``; the connections may use others later."""
        now_s = time.monotonic()
        for state in list(self._balancer.connections.values()):
            if state.idle_s(now_s) >= idle_s and state.channel is not None:
                channel, state.channel = state.channel, None
                await channel.close()

    async def _end(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        await self._close_channels(-math.inf)

    def _close(self) -> None:
        # A blocked loop closes them later, or the end of the process does.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._end(), _CLOSE_S)


async def _has_gone(channel: grpc.aio.Channel) -> bool:
    """Return whether the endpoint is gone, just after a call has failed as if it were."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NOTICE_S):
            if channel.get_state() is _READY:  # gRPC reports failed calls first
                await channel.wait_for_state_change(_READY)
    return channel.get_state() is not _READY


def _passed_on(metadata: Iterable[Entry]) -> tuple[Entry, ...]:
    return tuple(
        (key, value)
        for key, value in metadata
        if key not in _HOP_BY_HOP and not key.startswith(("grpc-", ":"))
    )


def _shown_to(target: Target, metadata: Iterable[Entry]) -> tuple[Entry, ...]:
    others = (pair for pair in _passed_on(metadata) if pair[0] != AUTHORIZATION_METADATA_KEY)
    own: list[Entry] = [(GATEWAY_METADATA_KEY, "1")]
    if target.token is not None:
        own.insert(0, (AUTHORIZATION_METADATA_KEY, bearer_value(target.token)))
    return (*others, *own)


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    """Forward the client's messages; each waits until there is room for it."""
    write = message_writer(call)
    try:
        await call.wait_for_connection()
        async for message in requests:
            await write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        return  # the call has ended, and ``_receive`` sees its status


async def _receive(call: Any, context: grpc.aio.ServicerContext) -> None:
    headers = await call.initial_metadata()
    if headers or not call.done():
        # Immediately: some clients wait for the headers before they send anything.
        await context.send_initial_metadata(_passed_on(headers or ()))
    try:
        async for message in call:
            await context.write(message)
    except grpc.aio.AioRpcError:
        return  # the caller reads its status
