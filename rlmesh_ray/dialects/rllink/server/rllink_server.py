"""RLlinkServer: the port for external simulators, in either encoding of RLlink.

Each connection has a task of its own. A frame that has begun must be complete in time, and an
answer be received in time. A client that breaks a rule gets an error and is disconnected, without
effect on the others. There is no limit to the time between two frames.
"""

import asyncio
import logging
from functools import partial

from rlmesh_ray.auth.token_file import TokenSource, TokenStore
from rlmesh_ray.dialects.rllink.server.connection import (
    ClientSession,
    ClientSessionFactory,
    ImmediateOrLaterReply,
    RLlinkConnection,
    RLlinkLimits,
)
from rlmesh_ray.errors import AddressError, CapacityError, ListenError
from rlmesh_ray.grpc_setup import is_fork
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.server.bind_policy import (
    TlsSource,
    checked_address,
    listen_arguments,
    resolve_server_tls,
    warn_without_token,
)
from rlmesh_ray.server.event_loop import shared_loop
from rlmesh_ray.server.session_limit import require_descriptors

__all__ = [
    "ClientSession",
    "ClientSessionFactory",
    "ImmediateOrLaterReply",
    "RLlinkLimits",
    "RLlinkServer",
]

_LOG = logging.getLogger(__name__)

_STOP_S = 5.0


class RLlinkServer:
    """Listens for simulators.

    Args:
        host: Talks with them.
        address: ``HOST:PORT``; port 0: a free one.
        token: What clients must show in their first PING, or the file with such tokens; required
            unless ``address`` is loopback.
        tls: Files for TLS; None for plain text.
        no_token: Whether it may do without a token where other machines can reach it.
        limits: What a client may ask of the port.

    Raises:
        AddressError: ``address`` is malformed, or needs a token.
        ConfigurationError: ``token`` is nothing that can be shown, or Ray's own, or a file cannot
            be used.
    """

    def __init__(
        self,
        host: ClientSessionFactory,
        *,
        address: str = "127.0.0.1:0",
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        limits: RLlinkLimits | None = None,
    ) -> None:
        self._wanted = checked_address(address, token, no_token=no_token)
        if self._wanted.path:
            raise AddressError(f"{address}: RLlink is spoken over TCP; give HOST:PORT")
        self._host = host
        self._known = None if token is None else TokenStore(token)
        files = resolve_server_tls(tls)
        self._tls = None if files is None else files.context()
        self._limits = limits or RLlinkLimits()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        # Connections that have not been admitted by their first message, the oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._bound: Address | None = None

    @property
    def address(self) -> str:
        return str(self._bound or self._wanted)

    @property
    def is_serving(self) -> bool:
        return self._server is not None

    def start(self) -> None:
        """Listen; clients may come before this returns.

        Raises:
            ListenError: The address is in use, or not this machine's.
        """
        if self._known is None:
            warn_without_token(self._wanted)
        try:
            shared_loop().run(self._start())
        except OSError as error:
            raise ListenError(
                f"cannot listen on {self._wanted}: {error}; give another port, or 0 for a free one"
            ) from error

    def stop(self) -> None:
        """Close the port and every connection. Idempotent; blocks. In a fork, it does nothing."""
        if self._server is not None and not is_fork():
            shared_loop().run(self._stop(), _STOP_S)

    async def _start(self) -> None:
        self._server = await asyncio.start_server(
            self._serve,
            **listen_arguments(self._wanted),
            limit=2**18,
            ssl=self._tls,
            ssl_handshake_timeout=self._limits.stranger_timeout_s if self._tls else None,
        )
        port = self._server.sockets[0].getsockname()[1]
        self._bound = Address(self._wanted.host, port)

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = [*self._tasks, *self._strangers]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connection = RLlinkConnection(reader, writer, self._limits)
        if self._server is None:
            writer.close()
            return
        self._admit(task)
        try:
            await connection.serve(self._host, self._known, partial(self._seat, task))
        except (OSError, EOFError, TimeoutError) as error:
            _LOG.info("%s has gone: %s", connection.peer, error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the port is closed: asyncio's server would log it
        finally:
            self._tasks.discard(task)
            self._strangers.pop(task, None)
            writer.transport.abort()

    def _admit(self, task: "asyncio.Task[None]") -> None:
        if len(self._strangers) >= self._limits.max_strangers:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.cancel()
        self._strangers[task] = None

    def _seat(self, task: "asyncio.Task[None]") -> bool:
        """Count a client that may stay; return whether there is a place."""
        self._strangers.pop(task, None)
        if len(self._tasks) >= self._limits.max_clients:
            return False
        try:
            require_descriptors(0)
        except CapacityError as error:
            _LOG.warning("a simulator is refused: %s", error.message)
            return False
        self._tasks.add(task)
        return True
