"""One call through a gateway: bytes in, bytes out, nothing parsed and nothing repeated."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from functools import partial
from typing import Any

from rlmesh_ray.auth.tokens import bearer_value
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import (
    AUTHORIZATION_METADATA_KEY,
    GATEWAY_METADATA_KEY,
    SESSION_METADATA_KEY,
)
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.gateway_upstreams import NoEndpointError, Upstream, Upstreams
from rlmesh_ray.server.session_limit import refusing_when_full
from rlmesh_ray.wire import health_v1

Metadata = tuple[tuple[str, str | bytes], ...]

# Metadata of one of the two connections; gRPC writes its own for the other.
_HOP_BY_HOP = frozenset({"content-type", "host", "user-agent"})
_REFUSED = (
    "the endpoint behind this gateway does not take the gateway's token: its port may have gone to "
    "another one; dial the gateway again"
)

_ENDED = "the call was ended behind the gateway; dial the gateway again"


def passed_on(metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Return the metadata of a call that are forwarded."""
    return tuple(
        (key, value)
        for key, value in metadata or ()
        if key not in _HOP_BY_HOP and not key.startswith(("grpc-", ":"))
    )


def shown_to(target: Target, metadata: Iterable[tuple[str, str | bytes]] | None) -> Metadata:
    """Return a client's metadata for ``target``: with the token of ``target``."""
    forwarded = (pair for pair in passed_on(metadata) if pair[0] != AUTHORIZATION_METADATA_KEY)
    token = (
        () if target.token is None else ((AUTHORIZATION_METADATA_KEY, bearer_value(target.token)),)
    )
    return (*forwarded, *token, (GATEWAY_METADATA_KEY, "1"))


class GatewayCalls(grpc.ServiceRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Forwards every call of every service, except health checks, to an endpoint.

    Args:
        upstreams: Connections to the endpoints.
        service: The service name that the gateway's health checks know.
    """

    def __init__(self, upstreams: Upstreams, service: str) -> None:
        self._upstreams = upstreams
        self._service = service

    def service_name(self) -> str:
        """Return the service that the endpoints have."""
        return self._service

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return the handler that forwards a call; on the wire all kinds of calls are streams."""
        if details.method.startswith(f"/{health_v1.SERVICE}/"):
            return None
        return grpc.stream_stream_rpc_method_handler(partial(self._forward, details.method))

    async def _forward(
        self, method: str, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        connection, metadata = context.peer(), context.invocation_metadata()
        is_bound = any(key == SESSION_METADATA_KEY for key, _ in metadata or ())
        try:
            async with refusing_when_full(context):
                upstream = await self._upstreams.route(connection, is_bound=is_bound)
        except (NoEndpointError, ConfigurationError) as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
            raise  # never reached: abort raises
        state = self._upstreams.begin(connection, upstream)
        call = upstream.channel.stream_stream(method)(
            timeout=context.time_remaining(), metadata=shown_to(upstream.target, metadata)
        )
        sending = asyncio.ensure_future(_send(requests, call))
        try:
            await _receive(call, context)
            code, details = await call.code(), await call.details()
            trailing = passed_on(await call.trailing_metadata())
        finally:
            # Also when the client has gone: the endpoint's session must end.
            sending.cancel()
            call.cancel()
            self._upstreams.end(state)
        if code is grpc.StatusCode.OK:
            context.set_trailing_metadata(trailing)
            return
        code, details = await self._client_status(connection, upstream, code, details or "")
        await context.abort(code, details, trailing)

    async def _client_status(
        self, connection: str, upstream: Upstream, code: grpc.StatusCode, details: str
    ) -> tuple[grpc.StatusCode, str]:
        """Return the status of a call for the client."""
        if code is grpc.StatusCode.UNAUTHENTICATED:  # the client's token is not to blame
            self._upstreams.note_lost(connection, upstream)
            return grpc.StatusCode.UNAVAILABLE, _REFUSED
        if code is grpc.StatusCode.CANCELLED:  # else the client would take it for its own
            return grpc.StatusCode.UNAVAILABLE, _ENDED
        if code is not grpc.StatusCode.UNAVAILABLE:
            return code, details
        if not await upstream.has_gone():  # the endpoint itself returned this: it drains, or stops
            self._upstreams.note_refused(upstream)
            return code, details
        self._upstreams.note_lost(connection, upstream)
        return code, f"the endpoint behind the gateway has gone ({details}); dial the gateway again"


async def _send(requests: AsyncIterator[bytes], call: Any) -> None:
    """Forward the client's messages; each waits until there is room for it."""
    # ``call.write`` replaces the status of a call that the endpoint has just ended.
    parts = getattr(call, "_cython_call", None)
    write = call.write if parts is None else parts.send_serialized_message
    try:
        await call.wait_for_connection()
        async for message in requests:
            await write(message)
        await call.done_writing()
    except (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError):
        return  # the call has ended, and ``_receive`` sees its status


async def _receive(call: Any, context: grpc.aio.ServicerContext) -> None:
    """Forward the endpoint's headers and messages to the client, until the call ends."""
    headers = await call.initial_metadata()
    if headers or not call.done():
        # At once: some clients wait for the headers before they send anything.
        await context.send_initial_metadata(passed_on(headers))
    try:
        async for message in call:
            await context.write(message)
    except grpc.aio.AioRpcError:
        return  # the caller reads its status
