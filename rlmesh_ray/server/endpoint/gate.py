"""Gate: what every call passes before its handler: a name in the log, the token, the drain.

It looks at a call's path and metadata only: no message of an unauthenticated client is decoded.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

from rlmesh_ray.auth.token_file import ServerToken, TokenStore, required_role, token_store
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY, SESSION_METADATA_KEY
from rlmesh_ray.server.endpoint.drain import DRAINING
from rlmesh_ray.server.endpoint.log import enter, short_name

_SCHEME = "Bearer "
_HOW = (
    "--token-file or the variable RLMESH_RAY_TOKEN of rlmesh-ray; in Python token=… is the token "
    "itself, and token=TokenFile(PATH) reads it from a file"
)
_MISSING = "this {} requires a token, and the call carries none; give it one: " + _HOW
_UNKNOWN = "this {} requires another token than the call carries; give it the right one: " + _HOW
_SEVERAL = "this call carries several tokens; send one"
_SESSIONS = frozenset({"Join", "Process"})
"""Streams that are a session each, in the services of all protocols."""

_Join = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]


class Gate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Names each call, refuses those without a valid token, and counts the sessions of an endpoint.

    Once it is closed, it refuses new sessions. To be used in the serving loop only. It stands in
    front of services that take raw bytes.

    Args:
        endpoint_id: Name of the endpoint in the log.
        token: The token that calls carry, as ``Bearer TOKEN`` or alone, or the file with such
            tokens; None or False: no check.
        kind: Kind of server in messages: ``"endpoint"``, ``"gateway"`` or ``"registrar"``.

    Raises:
        ConfigurationError: The token cannot be carried in metadata, or its file cannot be used.
    """

    def __init__(self, endpoint_id: str, token: ServerToken, kind: str) -> None:
        self._endpoint_id = endpoint_id
        self._store = token_store(token)
        self._kind = kind
        self._num_sessions = 0
        self.is_closed = False
        """Whether new Handshake and Join calls are refused, for good."""
        self._empty = asyncio.Event()
        self._empty.set()

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
        metadata = details.invocation_metadata or ()
        method = details.method.rpartition("/")[2]
        session_id = str(dict(metadata).get(SESSION_METADATA_KEY, ""))
        is_named = bool(session_id) or method in _SESSIONS
        # Each call runs in its own task, with this and the handler: nothing has to be undone at the
        # end of the call.
        enter(self._endpoint_id, short_name(session_id) if is_named else "")
        # First: strangers do not learn that an endpoint drains.
        if self._store is not None and (refusal := self._unauthorized(self._store, details)):
            return refusal
        handler = await continuation(details)
        if handler is None:
            return None
        # A gateway's handlers are streams all of them, and it does not drain.
        if self.is_closed and method == "Handshake" and handler.unary_unary is not None:
            return _refusal(grpc.StatusCode.UNAVAILABLE, DRAINING)
        if method in _SESSIONS:
            return grpc.stream_stream_rpc_method_handler(partial(self._join, handler.stream_stream))
        return handler

    def _unauthorized(
        self, store: TokenStore, details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        tokens = [
            value
            for key, value in details.invocation_metadata or ()
            if key == AUTHORIZATION_METADATA_KEY
        ]
        if len(tokens) > 1:
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, _SEVERAL)
        # Clients of ``rlmesh-wire-v1`` send it without the scheme.
        role = store.role_of(str(*tokens).removeprefix(_SCHEME).encode())
        if role is None:
            reason = (_UNKNOWN if any(tokens) else _MISSING).format(self._kind)
            return _refusal(grpc.StatusCode.UNAUTHENTICATED, reason)
        required = required_role(details.method)
        if role < required:
            return _refusal(
                grpc.StatusCode.PERMISSION_DENIED,
                f"at this {self._kind} {details.method} requires a token of the role "
                f"{required.label}, and this one has the role {role.label}",
            )
        return None

    async def _join(
        self, join: _Join, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        if self.is_closed:
            await context.abort(grpc.StatusCode.UNAVAILABLE, DRAINING)
        self.note_begun()
        # Not a ``finally``: a coroutine that is suspended when its call breaks off reaches it late.
        context.add_done_callback(lambda _context: self.note_ended())
        await join(requests, context)

    def note_begun(self) -> None:
        """Count a session that begins; a further port counts its own."""
        self._num_sessions += 1
        self._empty.clear()

    def note_ended(self) -> None:
        self._num_sessions -= 1
        if not self._num_sessions:
            self._empty.set()


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(partial(_refuse, code, reason))


async def _refuse(
    code: grpc.StatusCode, reason: str, _requests: Any, context: grpc.aio.ServicerContext
) -> None:
    await context.abort(code, reason)
