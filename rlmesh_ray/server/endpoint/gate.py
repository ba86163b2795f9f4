"""What an endpoint lets in: the limits of connections and sessions, the token, the drain.

Sizes of messages follow from the spaces (``wire.rlmesh_v1.limits``); RLlink's port has
``dialects.rllink.server.connection.RLlinkLimits``.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from rlmesh_ray.auth.token_file import ServerToken, TokenStore, required_role, token_store
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import AUTHORIZATION_METADATA_KEY, SESSION_METADATA_KEY
from rlmesh_ray.server.endpoint.log import enter, short_name

# --- limits --------------------------------------------------------------------------------------

MAX_STREAMS = 128
"""Calls at a time on one connection; further ones wait at the client."""
MAX_CALLS = 4096
"""Calls at a time at an endpoint without a number of sessions; further ones are refused."""
MAX_METADATA_BYTES = 8 * 1024
"""Size of all metadata of a call; gRPC refuses a call with more."""
CONNECTION_SETUP_S = 20.0
"""How long a connection may take to become one (TLS, HTTP/2)."""
CONNECTION_IDLE_S = 300.0
"""How long a connection without a call is kept at most; clients open another one by themselves."""

_CALLS_BESIDES = 256
_CALLS_BESIDE_STREAMS = 3


def max_calls(num_sessions: int, num_streams: int = 1) -> int:
    """Return how many calls an endpoint takes at a time, given its sessions and their streams.

    Besides these there are handshakes, health checks, calls into lanes, and clients that wait.
    """
    return (num_streams + _CALLS_BESIDE_STREAMS) * num_sessions + _CALLS_BESIDES


def connection_options() -> list[tuple[str, int]]:
    return [
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", int(CONNECTION_SETUP_S * 1000)),
        # gRPC checks a connection once per this period, and closes it if there was no call since
        # the check before: after one to two periods.
        ("grpc.max_connection_idle_ms", int(CONNECTION_IDLE_S * 500)),
    ]


_FEWEST_SPARE, _MOST_SPARE = 4, 64
"""Descriptors that stay free, to accept connections that are refused, and to read files."""
_SPARE_SHARE = 16
RAISE_LIMITS = "close a session, or have the endpoint's operator allow more (ulimit -n)"
"""The remedy where descriptors are short."""


def require_descriptors(count: int) -> None:
    """Raise a CapacityError if this process cannot open ``count`` descriptors, and a few more."""
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
    try:
        yield
    except CapacityError as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)


# --- the end of an endpoint ----------------------------------------------------------------------


class Drain:
    """Counts the pending requests of an endpoint, so that it stops without leaving one unanswered.

    For the serving loop. Rule: once ``is_draining``, a session takes at most one request more, and
    ends when it has answered all that it took.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self.is_draining = False
        self._settled = asyncio.Event()
        self.preparations: list[Callable[[], Awaitable[None]]] = []
        """Awaited before the drain ends, for work that is not counted as requests."""

    def begin_request(self) -> None:
        self._num_pending += 1

    def end_request(self, count: int = 1) -> None:
        """Note that ``count`` requests were answered, or that their clients are gone."""
        self._num_pending -= count
        if self.is_draining and not self._num_pending:
            self._settled.set()

    @contextlib.contextmanager
    def request_in_progress(self) -> Iterator[None]:
        self.begin_request()
        try:
            yield
        finally:
            self.end_request()

    async def run(self) -> None:
        """Stop taking new requests, and wait until all pending ones are answered."""
        self.is_draining = True
        with self.request_in_progress():
            await asyncio.gather(*(preparation() for preparation in self.preparations))
        await self._settled.wait()


# --- calls ---------------------------------------------------------------------------------------

DRAINING = "draining: this endpoint takes no new sessions, dial another endpoint"
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

    Once it is closed, it refuses new sessions. For the serving loop. It looks at a call's path and
    metadata only: no message of an unauthenticated client is decoded.
    """

    def __init__(self, endpoint_id: str, token: ServerToken, kind: str) -> None:
        self._endpoint_id = endpoint_id
        self._store = token_store(token)
        self._kind = kind
        self._num_sessions = 0
        self.is_closed = False
        """Whether new Handshake and Join calls are refused, for good."""
        self.empty = asyncio.Event()
        """Set while no session is open."""
        self.empty.set()

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
        self.empty.clear()

    def note_ended(self) -> None:
        self._num_sessions -= 1
        if not self._num_sessions:
            self.empty.set()


def _refusal(code: grpc.StatusCode, reason: str) -> grpc.RpcMethodHandler:
    return grpc.stream_stream_rpc_method_handler(partial(_refuse, code, reason))


async def _refuse(
    code: grpc.StatusCode, reason: str, _requests: Any, context: grpc.aio.ServicerContext
) -> None:
    await context.abort(code, reason)
