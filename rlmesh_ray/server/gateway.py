"""GatewayServer: one address for many endpoints, which may come, go and move."""

import asyncio
import contextlib
from typing import Self

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import AddressError
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.server.bind_policy import TlsSource
from rlmesh_ray.server.endpoint import Endpoint
from rlmesh_ray.server.event_loop import shared_loop
from rlmesh_ray.server.gateway_calls import GatewayCalls
from rlmesh_ray.server.gateway_health import GatewayHealth
from rlmesh_ray.server.gateway_upstreams import Credentials, FindTargets, Upstreams
from rlmesh_ray.server.health import Health
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

_CLOSE_S = 5.0


class GatewayServer:
    """Forwards every call of every protocol, unparsed, to one of several endpoints.

    Each connection of a client goes to one endpoint, the one with the fewest connections, for as
    long as that lives. When it is gone, the calls there end with UNAVAILABLE; the gateway repeats
    none of them. The connection's next call goes to another endpoint, unless it names a session:
    that has gone, too. Usable as a context manager.

    An agent that joins a dm_env_rpc world by a connection of its own may reach another endpoint:
    worlds of several agents need a single endpoint behind the gateway.

    Args:
        find: Returns the endpoints that take new connections; called in a thread, at most once a
            second unless one fails.
        address: ``HOST:PORT`` (port 0: a free one).
        token: The token that clients must send, or a ``TokenFile`` with such tokens; required
            unless ``address`` is loopback. The gateway sends each endpoint that endpoint's own.
        tls: Files for TLS with the clients.
        no_token: Whether to listen where other machines can reach it without a token.
        endpoint_credentials: TLS credentials for the endpoints; default: plain text.
        service: Full name of the endpoints' service, for requests for its health.
        max_receive_bytes: Size of the largest request to forward; endpoints have limits of
            their own.

    Raises:
        AddressError: ``address`` is malformed, a unix socket, or needs a token.
        ConfigurationError: ``token`` is nothing that a call can carry, or a file cannot be used.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        find: FindTargets,
        *,
        address: str = "127.0.0.1:0",
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        endpoint_credentials: Credentials | None = None,
        service: str = "",
        max_receive_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        if parse_address(address).path:
            raise AddressError(
                f"a gateway cannot listen on {address}: connections of a unix socket have no "
                "names to tell them apart; use HOST:PORT"
            )
        self._upstreams = Upstreams(find, endpoint_credentials)
        self._calls = GatewayCalls(self._upstreams, service)
        self._watch = GatewayHealth(self._upstreams, endpoint_credentials)
        self._watching: asyncio.Task[None] | None = None
        self._max_receive_bytes = max_receive_bytes
        self._endpoint = Endpoint(
            address,
            token=token,
            tls=tls,
            no_token=no_token,
            on_stop=self._close,
            probe=self._watch.health,
            kind="gateway",
        )

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""
        return self._endpoint.address

    def start(self) -> Self:
        """Look for endpoints, then listen. Blocks until clients can connect.

        Raises:
            ListenError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
        """
        self._endpoint.require_new()
        try:
            shared_loop().run(self._watch.look())
            self._endpoint.start([self._calls], max_receive_bytes=self._max_receive_bytes)
        except BaseException:
            self._close()
            raise
        shared_loop().run(self._begin_watch())
        return self

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the gateway has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def health(self) -> Health:
        """Return whether at least one endpoint would serve a new client."""
        return self._endpoint.health()

    def stop(self, grace_s: float = 0.0) -> None:
        """End all calls and stop listening; the endpoints go on. Idempotent; blocks.

        Args:
            grace_s: How long calls may go on.
        """
        self._endpoint.stop(grace_s)

    async def _begin_watch(self) -> None:
        self._watching = asyncio.ensure_future(self._watch.run())

    def _close(self) -> None:
        # A blocked loop closes them later, or the end of the process does.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._close_connections(), _CLOSE_S)

    async def _close_connections(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._watch.close()
        await self._upstreams.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()
