"""The life cycle of a gRPC endpoint: bind, serve, stop."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from rlmesh_ray.errors import AddressError, LocalProtocolError
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.server.access import ServerTls, TokenGate, checked_address, is_wildcard
from rlmesh_ray.server.admission import Admission
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.health import Health, HealthService, Probe, always_serving, ask
from rlmesh_ray.server.loop import in_thread, shared_loop

_OPTIONS = [
    # Without this a second server shares the port silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 128),
    # What is sent is ours; whether it is too large is for the receiver to say.
    ("grpc.max_send_message_length", -1),
    # A frozen or unreachable client is found by pings; keepalive alone takes a minute, since
    # the kernel of a frozen process still acknowledges.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 4_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # A busy machine delivers pings in bunches; a session must not end for that.
    ("grpc.http2.max_ping_strikes", 0),
]

_DRAIN_S = 10.0  # for a stop that a client has asked for
_FLUSH_S = 0.1
# What the loop may take longer than it was given before it counts as held.
_LATE_S = 2.0
_SILENT_S = 5.0


class Endpoint:
    """A gRPC server in the process's serving loop.

    Args:
        address: Where to listen; port 0 lets the system choose.
        token: What every call must carry; None for no check (loopback only).
        tls: Files for TLS; None for plain text.
        on_stop: Ends what the services are made of; called once, after the last call.
        probe: Tells the health of what the services are made of.

    Raises:
        AddressError: ``address`` is malformed, or open to strangers without a token.
        ConfigurationError: ``token`` is nothing that a call can carry.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: ServerTls | None = None,
        on_stop: Callable[[], None],
        probe: Probe = always_serving,
    ) -> None:
        self._wanted = checked_address(address, token)
        self._admission = Admission()
        # The first one is the outermost: strangers do not learn that an endpoint drains.
        gate = [] if token is None else [TokenGate(token)]
        self._interceptors = [*gate, self._admission]
        self._tls = tls
        self._server: grpc.aio.Server | None = None
        self._bound: Address | None = None
        self._on_stop = on_stop
        self._probe = probe
        self._health: HealthService | None = None
        self._is_stopping = False
        self._stopping = threading.Lock()
        self._stopped = threading.Event()
        self.drain = Drain()
        """Where the services count what they owe."""

    @property
    def address(self) -> str:
        """Where it listens, as clients dial it.

        Raises:
            LocalProtocolError: It has not been started.
        """
        if self._bound is None:
            raise LocalProtocolError("the server has no address before start()")
        return str(self._bound)

    def require_new(self) -> None:
        """Make sure that it has not lived yet.

        Raises:
            LocalProtocolError: It was started or stopped before.
        """
        if self._bound is not None or self._stopped.is_set():
            raise LocalProtocolError("the server was started or stopped already; make a new one")

    def start(self, services: Sequence[grpc.ServiceRpcHandler], *, max_receive_bytes: int) -> None:
        """Bind and serve, ``grpc.health.v1`` besides ``services``.

        Args:
            services: What the server dispatches to.
            max_receive_bytes: Size of the largest message to accept; a larger one ends its call
                with RESOURCE_EXHAUSTED, and no other.

        Raises:
            AddressError: The address is in use or not this machine's.
            LocalProtocolError: It was started or stopped before.
        """
        self.require_new()
        shared_loop().run(self._start(services, max_receive_bytes))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the server has stopped; return whether it has."""
        return self._stopped.wait(timeout_s)

    def health(self) -> Health:
        """Tell whether it would serve a new client now, as ``grpc.health.v1`` tells on its port.

        Does not wait for the serving loop, so that it answers while a policy holds that. A loop
        that has not answered for 5 s, since somebody asked this, serves nobody.
        """
        if self._stopped.is_set():
            return Health(False, "it has stopped")
        if self._bound is None:
            return Health(False, "it has not been started")
        silent_for_s = shared_loop().silent_for_s()
        health = ask(self._current_health)
        if health.is_serving and silent_for_s > _SILENT_S:
            return Health(False, f"the serving loop has not answered for {silent_for_s:.0f} s")
        return health

    def begin_drain(self) -> None:
        """Refuse new sessions from now on, for good; those that are open go on. Idempotent.

        Whoever sees a refusal and asks for the health then is told that it does not serve.
        """
        # A loop that something holds lets nobody in meanwhile, and does this when it is free.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._close_door(), _LATE_S)

    def finish_sessions(self, timeout_s: float | None = None) -> bool:
        """Begin to drain, and block until the last session has ended; return whether it has.

        Args:
            timeout_s: How long to wait; None: as long as it takes.
        """
        self.begin_drain()
        waiting = self._admission.wait_empty(timeout_s)
        try:
            return shared_loop().run(waiting, None if timeout_s is None else _within_s(timeout_s))
        except TimeoutError:
            return False

    def stop(self, grace_s: float = 1.0) -> None:
        """Accept nothing new, answer what is outstanding, end. Idempotent; blocks.

        It takes little longer than ``grace_s``, whatever happens: if something holds the serving
        loop, it gives up waiting 2 s later. Clients are then cut off when the loop is free again,
        or the process ends.

        Args:
            grace_s: After how many seconds whatever is not answered yet is cut off.
        """
        with self._stopping:
            server, self._server = self._server, None
            if server is not None:
                with contextlib.suppress(TimeoutError):
                    shared_loop().run(self._end(server, grace_s), _within_s(grace_s))
                if self._wanted.path:
                    Path(self._wanted.path).unlink(missing_ok=True)
            if not self._stopped.is_set():
                try:
                    self._on_stop()
                finally:
                    self._stopped.set()

    def stop_soon(self) -> None:
        """Begin to stop, from the serving loop; ``wait`` tells when it is done."""
        in_thread(self.stop, _DRAIN_S)

    def _current_health(self) -> Health:
        if self._is_stopping:
            return Health(False, "it is stopping")
        if self._admission.is_closed:
            return Health(False, "it is draining: no new sessions")
        return self._probe()

    async def _close_door(self) -> None:
        self._admission.close()
        if self._health is not None:
            self._health.refresh()

    async def _end(self, server: grpc.aio.Server, grace_s: float) -> None:
        self._is_stopping = True
        if self._health is not None:
            self._health.end()
        ending = asyncio.ensure_future(server.stop(grace_s))
        draining = asyncio.ensure_future(self.drain.run())
        await asyncio.wait({ending, draining}, return_when=asyncio.FIRST_COMPLETED)
        draining.cancel()
        # Calls whose last answer is just leaving end by themselves, and well; the others are idle.
        await asyncio.wait({ending}, timeout=_FLUSH_S)
        await server.stop(None)
        await ending

    async def _start(
        self, services: Sequence[grpc.ServiceRpcHandler], max_receive_bytes: int
    ) -> None:
        options = [*_OPTIONS, ("grpc.max_receive_message_length", max_receive_bytes)]
        server = grpc.aio.server(interceptors=self._interceptors, options=options)
        names = [service.service_name() for service in services]
        self._health = HealthService(self._current_health, names)
        server.add_generic_rpc_handlers((*services, self._health.handlers()))
        port = self._bind(server)
        await server.start()
        self._server = server
        # Nobody can dial a wildcard: name this machine instead.
        host = "127.0.0.1" if is_wildcard(self._wanted) else self._wanted.host
        self._bound = Address(host, port, self._wanted.path)

    def _bind(self, server: grpc.aio.Server) -> int:
        target = str(self._wanted)
        if self._wanted.path and _is_served(self._wanted.path):
            raise AddressError(
                f"cannot listen on {target}: another server does; choose another path"
            )
        try:
            if self._tls is not None:
                port = server.add_secure_port(target, self._tls.credentials())
            else:
                port = server.add_insecure_port(target)
        except RuntimeError as error:
            raise AddressError(f"cannot listen on {target}: {_obstacle(self._wanted)}") from error
        return 0 if self._wanted.path else int(port)


def _within_s(given_s: float) -> float:
    """Return how long to wait for what the loop was given so much time for."""
    return min(given_s + _LATE_S, threading.TIMEOUT_MAX)


def _is_served(path: str) -> bool:
    """Tell whether somebody listens on a unix socket; gRPC would take the path away from them."""
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
