"""The port of an endpoint, which stays open: gRPC's server, and another one when that has crashed.

grpc.aio closes its port for good when its accept loop raises. Some of its versions do so for a call
whose path is not UTF-8, which any client can send. The open calls go on then, so there is no need
to end the sessions.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh_ray.errors import ListenError
from rlmesh_ray.grpc_setup import grpc, keep_in_forks, server_options
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.server.bind_policy import ServerTls, is_wildcard
from rlmesh_ray.server.connection_limits import connection_options

_LOG = logging.getLogger(__name__)

_LOOK_S = 0.2
_FOR_EVER_S = 1e6


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """What a port serves."""

    interceptors: Sequence[grpc.aio.ServerInterceptor]
    """The first one is the outermost."""
    services: Sequence[grpc.ServiceRpcHandler]
    max_receive_bytes: int
    """Size of the largest message to accept."""
    max_calls: int
    """How many calls to take at a time."""


class Listener:
    """Keeps a port open. For the serving loop.

    Args:
        address: Where to listen; port 0 lets the system choose.
        tls: Files for TLS; None for plain text.

    Raises:
        ConfigurationError: A file cannot be used; the message names it and the remedy.
    """

    def __init__(self, address: Address, tls: ServerTls | None) -> None:
        self.is_open = False
        """Whether calls are accepted."""
        self._address = address
        # Read once: the port opens again also if the files have changed.
        self._credentials = None if tls is None else tls.credentials()
        # The last one accepts calls; those before it, which have crashed, have calls that go on.
        self._servers: list[grpc.aio.Server] = []
        self._watching: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()

    async def open(self, dispatch: ServerConfig) -> Address:
        """Bind and serve; return the address that clients dial.

        Raises:
            ListenError: The address is in use or not this machine's.
        """
        if self._address.path and _is_served(self._address.path):
            raise ListenError(
                f"cannot listen on {self._address}: another server does; choose another path"
            )
        port = await self._serve(dispatch)
        self._address = Address(self._address.host, port, self._address.path)
        self._watching = asyncio.ensure_future(self._keep_open(dispatch))
        # A wildcard cannot be dialed: name this machine instead.
        host = "127.0.0.1" if is_wildcard(self._address) else self._address.host
        return Address(host, port, self._address.path)

    async def close(self, grace_s: float | None) -> None:
        """Accept nothing new, and wait until all calls have ended. Idempotent.

        Args:
            grace_s: After how many seconds calls are cut off; None: at once.
        """
        if self._watching is not None:
            self._watching.cancel()
        self.is_open = False
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _serve(self, dispatch: ServerConfig) -> int:
        server = keep_in_forks(
            grpc.aio.server(
                interceptors=dispatch.interceptors,
                options=[*server_options(dispatch.max_receive_bytes), *connection_options()],
                maximum_concurrent_rpcs=dispatch.max_calls,
            )
        )
        server.add_generic_rpc_handlers(tuple(dispatch.services))
        target = str(self._address)
        try:
            if self._credentials is not None:
                port = server.add_secure_port(target, self._credentials)
            else:
                port = server.add_insecure_port(target)
        except RuntimeError as error:
            raise ListenError(f"cannot listen on {target}: {_obstacle(self._address)}") from error
        # First, so that a ``close`` meanwhile stops it, too.
        self._servers.append(server)
        await server.start()
        self.is_open = True
        return 0 if self._address.path else int(port)

    async def _keep_open(self, dispatch: ServerConfig) -> None:
        while True:
            server = self._servers[-1]
            try:
                while True:
                    await server.wait_for_termination(_LOOK_S)
            except Exception as error:  # noqa: BLE001  # in any case no call is accepted any more
                self.is_open = False
                _LOG.error(
                    "%s opens again: gRPC has closed it (%r), which a malformed call can bring "
                    "about; open sessions go on",
                    self._address,
                    error,
                )
            # First gRPC's own way of ending it, which would cut off its calls if it came later.
            await asyncio.sleep(0)
            ending = asyncio.ensure_future(self._outlive(server))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            await self._open_again(dispatch)

    async def _open_again(self, dispatch: ServerConfig) -> None:
        while True:
            try:
                await self._serve(dispatch)
            except ListenError as error:  # perhaps the port is not free yet
                _LOG.error("%s is still closed: %s", self._address, error)
                await asyncio.sleep(_LOOK_S)
            else:
                return

    async def _outlive(self, server: grpc.aio.Server) -> None:
        """Keep a server that accepts nothing any more until its last call has ended."""
        await server.stop(_FOR_EVER_S)
        self._servers.remove(server)


def _is_served(path: str) -> bool:
    """Return whether a server listens on a unix socket; gRPC would take its path away."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


def _obstacle(address: Address) -> str:
    if address.path:
        return "its folder does not exist or is not writable, or the path is longer than 100 bytes"
    return (
        "it is in use or not an address of this machine; choose another port, or 0 for a free one"
    )
