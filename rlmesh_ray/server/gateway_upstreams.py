"""The connections between a gateway and its endpoints: one for each connection of a client.

So an endpoint sees its clients as if they had come directly: limits for a connection, and what some
protocols remember of one, are each client's own, and no client waits for another's large message.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlmesh_ray.grpc_setup import channel_options, grpc, keep_in_forks
from rlmesh_ray.protocol.gateway_balancer import ConnectionState, GatewayBalancer, Target
from rlmesh_ray.server.error_text import clipped, text_of
from rlmesh_ray.server.event_loop import in_thread
from rlmesh_ray.server.session_limit import require_descriptors

_LOG = logging.getLogger(__name__)

FindTargets = Callable[[], Sequence[Target]]
"""Returns the endpoints that take new connections; may block, and is called in a thread."""
Credentials = Callable[[], grpc.ChannelCredentials]
"""Returns the TLS credentials for an endpoint; called for each connection."""

CONNECT_TIMEOUT_S = 3.0
"""For an endpoint to accept a connection, before another one is tried."""
_NOTICE_S = 0.2
_LISTED_S = 1.0
_LISTING_TIMEOUT_S = 5.0
# An endpoint's connection outlives its client's by so much: gRPC does not report when one closes.
_IDLE_S = 5.0
# It reaches clients in metadata, which must stay below 8 KiB.
_MOST_OBSTACLE_CHARACTERS = 500


class NoEndpointError(Exception):
    """No endpoint can take a call; the text is for the client."""


@dataclass(frozen=True, slots=True, eq=False)
class Upstream:
    """A connection to an endpoint."""

    target: Target
    channel: grpc.aio.Channel

    @property
    def is_up(self) -> bool:
        """Whether it is connected now."""
        return bool(self.channel.get_state() is grpc.ChannelConnectivity.READY)

    async def has_gone(self) -> bool:
        """Return whether the endpoint is gone, just after a call has failed as if it were."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_NOTICE_S):
                if self.is_up:  # gRPC reports failed calls before the failed connection
                    await self.channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        return not self.is_up

    async def connect(self) -> bool:
        """Wait for the connection; return whether it is there."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while True:
                    state = self.channel.get_state(try_to_connect=True)
                    if state is grpc.ChannelConnectivity.READY:
                        return True
                    if state in (
                        grpc.ChannelConnectivity.TRANSIENT_FAILURE,
                        grpc.ChannelConnectivity.SHUTDOWN,
                    ):
                        return False
                    await self.channel.wait_for_state_change(state)
        except TimeoutError:
            return False


def open_upstream(target: Target, credentials: Credentials | None) -> Upstream:
    """Return a connection to ``target``, in plain text without credentials; not dialed yet.

    The two ends decide how large a message may be.
    """
    options = channel_options()
    if credentials is None:
        channel = grpc.aio.insecure_channel(target.address, options=options)
    else:
        channel = grpc.aio.secure_channel(target.address, credentials(), options=options)
    return Upstream(target, keep_in_forks(channel))


class Upstreams:
    """Assigns each connection of a client to an endpoint. To be used in the serving loop only.

    Args:
        find: Returns the endpoints.
        credentials: See ``Credentials``; None: plain text.
    """

    def __init__(self, find: FindTargets, credentials: Credentials | None) -> None:
        self._find = find
        self._credentials = credentials
        self.routes = GatewayBalancer()
        self._upstreams: dict[str, Upstream] = {}
        self._listing: asyncio.Future[Sequence[Target]] | None = None
        self._listed_s: float | None = None
        self._obstacle = ""

    async def route(self, connection: str, *, is_bound: bool) -> Upstream:
        """Return the upstream for a call of ``connection``; it is connected.

        Nothing of the call has been sent yet, so that another endpoint may be tried.

        Args:
            connection: gRPC's name of the client's connection.
            is_bound: Whether the call belongs to a session that an endpoint knows already.

        Raises:
            CapacityError: The gateway has too few file descriptors for another connection.
            NoEndpointError: No endpoint can be reached, or the one that knows the session has gone.
            ConfigurationError: The files for TLS with the endpoints cannot be used.
        """
        target = self.routes.target_of(connection, time.monotonic(), is_bound=is_bound)
        if target is not None:
            upstream = self._upstream(connection, target)
            if upstream.is_up or await upstream.connect():
                return upstream
            self.note_lost(connection, upstream)
        if is_bound:
            raise NoEndpointError(
                "the endpoint that knows this session has gone from behind the gateway; dial the "
                "gateway again"
            )
        await self.renew(at_once=target is not None)
        return await self._route_anew(connection)

    def begin(self, connection: str, upstream: Upstream) -> ConnectionState:
        """Note that a call goes by ``upstream``; ``end`` takes what this returns."""
        return self.routes.begin(connection, upstream.target, time.monotonic())

    def end(self, state: ConnectionState) -> None:
        """Note that a call has ended."""
        self.routes.end(state, time.monotonic())

    def note_lost(self, connection: str, upstream: Upstream) -> None:
        """Note that the endpoint of ``upstream`` is gone."""
        _LOG.info(
            "endpoint %s at %s has gone", upstream.target.endpoint_id, upstream.target.address
        )
        self.routes.fail(upstream.target, time.monotonic())
        self.routes.leave(connection, upstream.target)
        if self._upstreams.get(connection) is upstream:
            del self._upstreams[connection]

    def note_refused(self, upstream: Upstream) -> None:
        """Note that an endpoint, which is connected, refuses calls."""
        self.routes.fail(upstream.target, time.monotonic())

    async def renew(self, *, at_once: bool = False) -> None:
        """List the endpoints, unless the latest list is younger than a second."""
        now_s = time.monotonic()
        if not at_once and self._listed_s is not None and now_s - self._listed_s < _LISTED_S:
            return
        if self._listing is None:
            self._listing = in_thread(self._list)
            self._listing.add_done_callback(self._note_listing)
        # A list that comes too late counts for later calls.
        await asyncio.wait({self._listing}, timeout=_LISTING_TIMEOUT_S)

    async def close_idle(self) -> None:
        """Close upstreams that have had no call for a while; their clients may come again."""
        now_s = time.monotonic()
        self.routes.forget_idle(now_s)
        for connection, upstream in list(self._upstreams.items()):
            if self.routes.idle_for_s(connection, now_s) > _IDLE_S:
                del self._upstreams[connection]
                await upstream.channel.close()

    async def close(self) -> None:
        """Close all upstreams."""
        upstreams, self._upstreams = self._upstreams, {}
        for upstream in upstreams.values():
            await upstream.channel.close()

    async def _route_anew(self, connection: str) -> Upstream:
        tried: set[Target] = set()
        while target := self.routes.choose(connection, time.monotonic(), without=tried):
            upstream = self._upstream(connection, target)
            if await upstream.connect():
                _LOG.info("%s goes to endpoint %s", connection, target.endpoint_id)
                return upstream
            self.note_lost(connection, upstream)
            tried.add(target)
        if tried:
            raise NoEndpointError(
                f"none of the {len(tried)} endpoints behind this gateway answers; dial the "
                "gateway again when they are back"
            )
        raise NoEndpointError(
            f"there is no endpoint behind this gateway now{self._obstacle}; dial the gateway "
            "again when there is one"
        )

    def _upstream(self, connection: str, target: Target) -> Upstream:
        upstream = self._upstreams.get(connection)
        if upstream is None or upstream.target != target:
            require_descriptors(1)
            upstream = self._upstreams[connection] = open_upstream(target, self._credentials)
        return upstream

    def _list(self) -> Sequence[Target]:
        return self._find()

    def _note_listing(self, listing: "asyncio.Future[Sequence[Target]]") -> None:
        self._listing = None
        self._listed_s = time.monotonic()
        if listing.cancelled():
            return
        error = listing.exception()
        if error is None:
            self._obstacle = ""
            self.routes.renew(listing.result())
            return
        # Those that are known are probably still there.
        text = clipped(text_of(error), _MOST_OBSTACLE_CHARACTERS)
        self._obstacle = f" ({type(error).__name__}: {text})"
        _LOG.warning("the endpoints behind the gateway cannot be listed%s", self._obstacle)
