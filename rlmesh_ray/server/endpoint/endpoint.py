"""The life cycle of a gRPC endpoint: bind, serve, stop."""

import asyncio
import contextlib
import logging
import math
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, Self

from rlmesh_ray.auth.token_file import ServerToken
from rlmesh_ray.errors import ListenError, LocalProtocolError
from rlmesh_ray.grpc_setup import (
    grpc,
    is_fork,
    keep_in_forks,
    require_no_fork,
    server_options,
)
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.server.endpoint.bind_policy import (
    ServerTls,
    TlsSource,
    checked_address,
    is_wildcard,
    resolve_server_tls,
    warn_without_token,
)
from rlmesh_ray.server.endpoint.event_loop import in_thread, shared_loop
from rlmesh_ray.server.endpoint.gate import MAX_CALLS, Drain, Gate, connection_options
from rlmesh_ray.server.endpoint.health import Health, HealthService, Probe, run_probe
from rlmesh_ray.server.endpoint.log import facts, logged_as, new_endpoint_id

_LOG = logging.getLogger(__name__)

_DRAIN_S = 10.0  # for a stop that a client has asked for
_FLUSH_S = 0.1
_NAP_S = 1.0
"""Python looks for signals between two waits: one that came just before did not end the wait."""
# How much longer than its timeout the loop may take before it counts as blocked.
_LATE_S = 2.0
_SILENT_S = 5.0
_LOOK_S = 0.2
_FOR_EVER_S = 1e6


class FurtherPort(Protocol):
    """A port that an endpoint opens and closes together with gRPC's; used in the serving loop."""

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""

    async def open(self) -> None:
        """Listen, or raise an RlmeshError."""

    async def close(self, grace_s: float | None) -> None:
        """Accept nothing new, and wait until all connections have ended. Idempotent.

        After ``grace_s`` they are cut off; None: immediately.
        """


class Endpoint:
    """A gRPC server in the process's serving loop.

    Args:
        address: Where to listen; port 0 lets the system choose.
        token: What every call must carry; None or False: nothing, and None only on loopback.
        tls: Files for TLS; None for plain text.
        on_stop: Releases the resources of the services; called once, after the last call.
        probe: Returns the health of these resources.
        endpoint_id: Names it in the log; None: a random name.
        kind: What a refusal calls it, such as ``"gateway"``.

    Raises:
        AddressError: ``address`` is malformed, or needs a token.
        ConfigurationError: ``token`` is nothing that a call can carry, or is Ray's own; or a file
            cannot be used.
    """

    def __init__(
        self,
        address: str,
        *,
        token: ServerToken = None,
        tls: TlsSource | None = None,
        on_stop: Callable[[], None],
        probe: Probe = lambda: Health(True),
        endpoint_id: str | None = None,
        kind: str = "endpoint",
    ) -> None:
        self.endpoint_id = endpoint_id or new_endpoint_id()
        """Its name in the log."""
        self._wanted = checked_address(address, token)
        self._has_token = bool(token)
        self.sessions = Gate(self.endpoint_id, token, kind)
        """Counts the sessions, and refuses new ones once it drains."""
        self._further_ports: list[FurtherPort] = []
        # Before anything starts: gRPC would report a bad file as an address that cannot be bound.
        self._listener = Listener(self._wanted, resolve_server_tls(tls))
        self._bound: Address | None = None
        self._on_stop = on_stop
        self._probe = probe
        self._health: HealthService | None = None
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self.drain = Drain()
        """Counts the pending requests of the services."""

    @property
    def address(self) -> str:
        """The address that clients dial.

        Raises:
            LocalProtocolError: It has not been started.
        """
        if self._bound is None:
            raise LocalProtocolError("the server has no address before start()")
        return str(self._bound)

    def require_new(self) -> None:
        """Raise an RlmeshError if it was started or stopped before, or if this is a fork."""
        require_no_fork()
        if self._bound is not None or self._stopped.is_set():
            raise LocalProtocolError("the server was started or stopped already; make a new one")

    def add_port(self, port: FurtherPort) -> None:
        self._further_ports.append(port)

    def start(
        self,
        services: Sequence[grpc.ServiceRpcHandler],
        *,
        max_receive_bytes: int,
        max_calls: int = MAX_CALLS,
    ) -> None:
        """Bind and serve, ``grpc.health.v1`` besides ``services``.

        A message larger than ``max_receive_bytes`` ends its call with RESOURCE_EXHAUSTED, and no
        other call; so does a call that comes while ``max_calls`` are open.

        Raises:
            ListenError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
            RlmeshError: A further port cannot be opened.
        """
        self.require_new()
        with logged_as(self.endpoint_id):
            if not self._has_token:
                warn_without_token(self._wanted)
            shared_loop().run(self._start(services, max_receive_bytes, max_calls))
            _LOG.info("serving on %s", self.address, extra=facts("serving", address=self.address))

    def wait(self, timeout_s: float | None = None) -> bool:
        left_s = math.inf if timeout_s is None else timeout_s
        while left_s > _NAP_S and not self._stopped.wait(_NAP_S):
            left_s -= _NAP_S
        return self._stopped.wait(min(left_s, _NAP_S))

    def health(self) -> Health:
        """Return whether it would serve a new client now.

        Does not wait for the serving loop, so it answers while a policy blocks that. A loop that
        has not reacted for 5 s since an earlier call of this method counts as not serving.
        """
        if self._stopped.is_set():
            return Health(False, "it has stopped")
        if self._bound is None:
            return Health(False, "it has not been started")
        unresponsive_for_s = shared_loop().unresponsive_for_s()
        health = run_probe(self._current_health)
        if health.is_serving and unresponsive_for_s > _SILENT_S:
            return Health(
                False, f"the serving loop has not answered for {unresponsive_for_s:.0f} s"
            )
        return health

    def finish_sessions(self, timeout_s: float | None = None) -> bool:
        """Refuse new sessions, for good; wait until the last one has ended, return whether it has.

        From the first refusal on, the health is that it does not serve.
        """
        finishing = self._finish_sessions(timeout_s)
        try:
            return shared_loop().run(finishing, None if timeout_s is None else _within_s(timeout_s))
        except TimeoutError:  # a blocked loop accepts no session, and does this when it is free
            return False

    def stop(self, grace_s: float = 1.0) -> None:
        """Accept nothing new, answer what is outstanding, end. Idempotent; blocks.

        It takes little longer than ``grace_s`` in any case: if the serving loop is blocked, it
        stops waiting 2 s later. Clients are then cut off when the loop is free again, or the
        process ends. In a fork of the process that serves, it does nothing.
        """
        if is_fork():
            return
        with self._stopping:
            if self._stopped.is_set():
                return
            if self._bound is not None:
                with contextlib.suppress(TimeoutError):
                    shared_loop().run(self._end(grace_s), _within_s(grace_s))
                with logged_as(self.endpoint_id):
                    _LOG.info("stopped", extra=facts("stopped", address=self.address))
                if self._wanted.path:
                    Path(self._wanted.path).unlink(missing_ok=True)
            try:
                self._on_stop()
            finally:
                self._stopped.set()

    def stop_soon(self) -> None:
        """Begin to stop, from the serving loop; ``wait`` returns when it is done."""
        in_thread(self.stop, _DRAIN_S)

    def _current_health(self) -> Health:
        if self.drain.is_draining:
            return Health(False, "it is stopping")
        if self.sessions.is_closed:
            return Health(False, "it is draining: no new sessions")
        if not self._listener.is_open:
            return Health(False, "its port is closed")
        return self._probe()

    async def _finish_sessions(self, timeout_s: float | None) -> bool:
        self.sessions.is_closed = True
        if self._health is not None:
            self._health.refresh()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.sessions.empty.wait(), timeout_s)
        return self.sessions.empty.is_set()

    async def _end(self, grace_s: float) -> None:
        draining = asyncio.ensure_future(self.drain.run())
        await asyncio.sleep(0)  # it drains from here on, which is a Watch's last status
        if self._health is not None:
            self._health.end()
        ending = asyncio.ensure_future(self._close_ports(grace_s))
        await asyncio.wait({ending, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        # Calls whose last answer is just leaving end by themselves, and well; the others are idle.
        await asyncio.wait({ending}, timeout=_FLUSH_S)
        await self._close_ports(None)
        await ending

    async def _close_ports(self, grace_s: float | None) -> None:
        further = (port.close(grace_s) for port in self._further_ports)
        await asyncio.gather(self._listener.close(grace_s), *further)

    async def _start(
        self, services: Sequence[grpc.ServiceRpcHandler], max_receive_bytes: int, max_calls: int
    ) -> None:
        names = [service.service_name() for service in services]
        self._health = HealthService(self._current_health, names)
        every_service = (*services, self._health.handlers())

        def make_server() -> grpc.aio.Server:
            server = keep_in_forks(
                grpc.aio.server(
                    interceptors=[self.sessions],
                    options=[*server_options(max_receive_bytes), *connection_options()],
                    maximum_concurrent_rpcs=max_calls,
                )
            )
            server.add_generic_rpc_handlers(every_service)
            return server

        bound = await self._listener.open(make_server)
        try:
            for port in self._further_ports:
                await port.open()
        except BaseException:
            await self._close_ports(None)
            raise
        self._bound = bound


def _within_s(given_s: float) -> float:
    return min(given_s + _LATE_S, threading.TIMEOUT_MAX)


class Server:
    """Base class of servers: what each has of its ``Endpoint``. Usable as a context manager."""

    _endpoint: Endpoint

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""
        return self._endpoint.address

    def start(self) -> Self:
        """Listen. Blocks until clients can connect."""
        raise NotImplementedError

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._endpoint.wait(timeout_s)

    def health(self) -> Health:
        """Return whether it would serve a new client now, as ``grpc.health.v1`` reports it."""
        return self._endpoint.health()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Refuse new sessions for good, and wait until the open ones have ended.

        The server does not stop: call ``stop`` afterwards.

        Args:
            timeout_s: How long to wait; None: as long as it takes.

        Returns:
            Whether no session is open any more.
        """
        return self._endpoint.finish_sessions(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Answer what is outstanding, then end the sessions. Idempotent; blocks.

        Args:
            grace_s: After how many seconds outstanding requests are cancelled.
        """
        self._endpoint.stop(grace_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class Listener:
    """Keeps a port open: by gRPC's server, and by another one when that has crashed.

    grpc.aio closes its port for good when its accept loop raises. Some of its versions do so for a
    call whose path is not UTF-8, which any client can send. The open calls continue then, so that
    sessions need not end. For the serving loop.
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

    async def open(self, make_server: Callable[[], grpc.aio.Server]) -> Address:
        """Bind and serve; return the address that clients dial, or raise a ListenError.

        ``make_server`` is called again after each crash.
        """
        if self._address.path and _is_served(self._address.path):
            raise ListenError(
                f"cannot listen on {self._address}: another server does; choose another path"
            )
        port = await self._serve(make_server)
        self._address = Address(self._address.host, port, self._address.path)
        self._watching = asyncio.ensure_future(self._keep_open(make_server))
        # A wildcard cannot be dialed: name this machine instead.
        host = "127.0.0.1" if is_wildcard(self._address) else self._address.host
        return Address(host, port, self._address.path)

    async def close(self, grace_s: float | None) -> None:
        """Accept nothing new, and wait until all calls have ended; as a ``FurtherPort`` does."""
        if self._watching is not None:
            self._watching.cancel()
        self.is_open = False
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _serve(self, make_server: Callable[[], grpc.aio.Server]) -> int:
        server = make_server()
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

    async def _keep_open(self, make_server: Callable[[], grpc.aio.Server]) -> None:
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
            await self._open_again(make_server)

    async def _open_again(self, make_server: Callable[[], grpc.aio.Server]) -> None:
        while True:
            try:
                await self._serve(make_server)
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
