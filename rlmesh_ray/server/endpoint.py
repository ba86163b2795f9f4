"""The life cycle of a gRPC endpoint: bind, serve, stop."""

import asyncio
import contextlib
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from rlmesh_ray.auth.interceptor import TokenInterceptor
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.grpc_setup import grpc, is_fork, require_no_fork
from rlmesh_ray.protocol.address import Address
from rlmesh_ray.protocol.capabilities import SESSION_METADATA_KEY
from rlmesh_ray.server.bind_policy import (
    TlsSource,
    checked_address,
    resolve_server_tls,
    warn_without_token,
)
from rlmesh_ray.server.connection_limits import MAX_CALLS
from rlmesh_ray.server.drain import Drain, DrainInterceptor
from rlmesh_ray.server.event_loop import in_thread, shared_loop
from rlmesh_ray.server.health import Health, HealthService, Probe, always_serving, run_probe
from rlmesh_ray.server.listener import Listener, ServerConfig
from rlmesh_ray.server.log_context import enter, facts, logged_as, new_endpoint_id, short_name

_LOG = logging.getLogger(__name__)

_DRAIN_S = 10.0  # for a stop that a client has asked for
_FLUSH_S = 0.1
_NAP_S = 1.0
"""Python looks for signals between two waits: one that came just before did not end the wait."""
# How much longer than its timeout the loop may take before it counts as blocked.
_LATE_S = 2.0
_SILENT_S = 5.0

_OPENING = frozenset({"Join", "Process"})


class LoggingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Lets every call through, and names it.

    A call has a task of its own, in which interceptors and handler run: so nothing needs to be
    undone at its end.

    Args:
        endpoint_id: The endpoint's name.
    """

    def __init__(self, endpoint_id: str) -> None:
        self._endpoint_id = endpoint_id

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Name the call, by the session that it opens or belongs to."""
        metadata = dict(details.invocation_metadata or ())
        session_id = str(metadata.get(SESSION_METADATA_KEY, ""))
        is_session = bool(session_id) or details.method.rpartition("/")[2] in _OPENING
        enter(self._endpoint_id, short_name(session_id) if is_session else "")
        return await continuation(details)


class FurtherPort(Protocol):
    """A port that an endpoint opens and closes beside gRPC's; used in the serving loop."""

    @property
    def address(self) -> str:
        """The address that clients dial; only after ``start``."""

    async def open(self) -> None:
        """Listen.

        Raises:
            RlmeshError: It cannot.
        """

    async def close(self, grace_s: float | None) -> None:
        """Accept nothing new, and wait until all connections have ended. Idempotent.

        Args:
            grace_s: After how many seconds connections are cut off; None: at once.
        """


class Endpoint:
    """A gRPC server in the process's serving loop.

    Args:
        address: Where to listen; port 0 lets the system choose.
        token: The token that every call must carry, or the file with such tokens; None: no check.
        tls: Files for TLS; None for plain text.
        no_token: Whether clients on other machines need no token.
        on_stop: Releases the resources of the services; called once, after the last call.
        probe: Returns the health of the services' resources.
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
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        on_stop: Callable[[], None],
        probe: Probe = always_serving,
        endpoint_id: str | None = None,
        kind: str = "endpoint",
    ) -> None:
        self.endpoint_id = endpoint_id or new_endpoint_id()
        """Its name in the log."""
        self._wanted = checked_address(address, token, no_token=no_token)
        self._has_token = token is not None
        self.sessions = DrainInterceptor()
        """Counts the sessions, and refuses new ones once it drains."""
        self._further_ports: list[FurtherPort] = []
        # The first one is the outermost: strangers do not learn that an endpoint drains.
        gate = [] if token is None else [TokenInterceptor(token, kind)]
        self._interceptors = [LoggingInterceptor(self.endpoint_id), *gate, self.sessions]
        # Before anything starts: gRPC would report a bad file as an address that cannot be bound.
        self._listener = Listener(self._wanted, resolve_server_tls(tls))
        self._is_serving = False
        self._bound: Address | None = None
        self._on_stop = on_stop
        self._probe = probe
        self._health: HealthService | None = None
        self._is_stopping = False
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
        """Make sure that it is new, and that this process can serve.

        Raises:
            ConfigurationError: This process was forked from one that had used gRPC.
            LocalProtocolError: It was started or stopped before.
        """
        require_no_fork()
        if self._bound is not None or self._stopped.is_set():
            raise LocalProtocolError("the server was started or stopped already; make a new one")

    def add_port(self, port: FurtherPort) -> None:
        """Open and close a further port with the endpoint; before ``start``."""
        self._further_ports.append(port)

    def start(
        self,
        services: Sequence[grpc.ServiceRpcHandler],
        *,
        max_receive_bytes: int,
        max_calls: int = MAX_CALLS,
    ) -> None:
        """Bind and serve, ``grpc.health.v1`` besides ``services``.

        Args:
            services: The gRPC services.
            max_receive_bytes: Size of the largest message to accept; a larger one ends its call
                with RESOURCE_EXHAUSTED, and no other.
            max_calls: How many calls to take at a time; further ones end with RESOURCE_EXHAUSTED.

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
        """Block until the server has stopped; return whether it has."""
        left_s = math.inf if timeout_s is None else timeout_s
        while left_s > _NAP_S and not self._stopped.wait(_NAP_S):
            left_s -= _NAP_S
        return self._stopped.wait(min(left_s, _NAP_S))

    def health(self) -> Health:
        """Return whether it would serve a new client now, as ``grpc.health.v1`` does on its port.

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
        """Refuse new sessions, and block until the last one has ended; return whether it has.

        They are refused for good: from the first refusal on, the health is that it does not serve.

        Args:
            timeout_s: How long to wait; None: as long as it takes.
        """
        # A blocked loop accepts no session meanwhile, and does this when it is free.
        with contextlib.suppress(TimeoutError):
            shared_loop().run(self._refuse_sessions(), _LATE_S)
        waiting = self.sessions.wait_empty(timeout_s)
        try:
            return shared_loop().run(waiting, None if timeout_s is None else _within_s(timeout_s))
        except TimeoutError:
            return False

    def stop(self, grace_s: float = 1.0) -> None:
        """Accept nothing new, answer what is outstanding, end. Idempotent; blocks.

        It takes little longer than ``grace_s`` in any case: if the serving loop is blocked, it
        stops waiting 2 s later. Clients are then cut off when the loop is free again, or the
        process ends. In a fork of the process that serves, it does nothing.

        Args:
            grace_s: After how many seconds unanswered requests are cut off.
        """
        if is_fork():
            return
        with self._stopping:
            was_serving, self._is_serving = self._is_serving, False
            if was_serving:
                with contextlib.suppress(TimeoutError):
                    shared_loop().run(self._end(grace_s), _within_s(grace_s))
                with logged_as(self.endpoint_id):
                    _LOG.info("stopped", extra=facts("stopped", address=self.address))
                if self._wanted.path:
                    Path(self._wanted.path).unlink(missing_ok=True)
            if not self._stopped.is_set():
                try:
                    self._on_stop()
                finally:
                    self._stopped.set()

    def stop_soon(self) -> None:
        """Begin to stop, from the serving loop; ``wait`` returns when it is done."""
        in_thread(self.stop, _DRAIN_S)

    def _current_health(self) -> Health:
        if self._is_stopping:
            return Health(False, "it is stopping")
        if self.sessions.is_closed:
            return Health(False, "it is draining: no new sessions")
        if not self._listener.is_open:
            return Health(False, "its port is closed")
        return self._probe()

    async def _refuse_sessions(self) -> None:
        self.sessions.close()
        if self._health is not None:
            self._health.refresh()

    async def _end(self, grace_s: float) -> None:
        self._is_stopping = True
        if self._health is not None:
            self._health.end()
        ending = asyncio.ensure_future(self._close_ports(grace_s))
        draining = asyncio.ensure_future(self.drain.run())
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
        dispatch = ServerConfig(self._interceptors, every_service, max_receive_bytes, max_calls)
        bound = await self._listener.open(dispatch)
        try:
            for port in self._further_ports:
                await port.open()
        except BaseException:
            await self._close_ports(None)
            raise
        self._bound = bound
        self._is_serving = True


def _within_s(given_s: float) -> float:
    """Return how long to wait for work that the loop has ``given_s`` for."""
    return min(given_s + _LATE_S, threading.TIMEOUT_MAX)
