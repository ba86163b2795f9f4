"""ConnectionBroker: the endpoint's listeners for direct connections, which lead clients to workers.

Shared memory: gRPC cannot pass descriptors, so the endpoint listens on a unix socket, too. It is in
the abstract namespace: it leaves no file, and only processes of this network namespace reach it. A
client that receives descriptors there is on this machine. It authenticates by its session id, which
it has from its handshake, and which cannot be guessed.

TCP: the endpoint listens on another port. A client authenticates by a ticket (``tickets``) that it
has requested by gRPC.
"""

import asyncio
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.transport import shared_memory, tcp
from rlmesh_ray.transport.direct_handle import DirectHandle
from rlmesh_ray.transport.tickets import PROOF_BYTES, Ticket, TicketIssuer
from rlmesh_ray.transport.unauthenticated_limit import AuthenticatingListener, read_exactly

_LOG = logging.getLogger(__name__)

OpenDirect = Callable[[int, socket.socket | None], Awaitable[DirectHandle | None]]
"""Opens a session's direct connection, given the timeout of its steps, and the client's connection
(None: shared memory). Returns None where that is not possible now."""
CloseDirect = Callable[[], Awaitable[None]]
"""Closes a session's direct connection, if any, after the step in progress."""

_HELLO_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class TcpListener:
    """Listening sockets for direct TCP connections."""

    sockets: Sequence[socket.socket]
    """Bound sockets, with the same port on several addresses."""
    port: int
    """The advertised port, which differs where it is mapped."""
    endpoint: str
    """Id and incarnation of the endpoint."""


@dataclass(slots=True, eq=False)
class _RegisteredSession:
    open_direct: OpenDirect
    close_direct: CloseDirect
    is_waiting: bool = False
    """Whether its client is already opening a connection: each takes descriptors."""

    async def open_once(
        self, timeout_ms: int, connection: socket.socket | None
    ) -> DirectHandle | None:
        """Open a direct connection, if no other one is being opened."""
        if self.is_waiting:
            return None
        self.is_waiting = True
        try:
            return await self.open_direct(timeout_ms, connection)
        finally:
            self.is_waiting = False


class ConnectionBroker:
    """Opens direct connections for the clients of open sessions. For the serving loop.

    Args:
        has_shared_memory: Whether the endpoint offers the shared-memory transport.
        listener: Sockets of the direct TCP transport; None: it is not offered.
    """

    def __init__(self, *, has_shared_memory: bool, listener: TcpListener | None = None) -> None:
        self._name = (
            secrets.token_hex(shared_memory.SOCKET_NAME_LENGTH // 2) if has_shared_memory else ""
        )
        self._listener = listener
        self._open: dict[str, _RegisteredSession] = {}
        self._tickets = TicketIssuer(listener.endpoint if listener is not None else "")
        self._listeners: list[AuthenticatingListener] = []

    @property
    def offered_capabilities(self) -> dict[str, str]:
        """The capabilities to offer; empty without any direct transport."""
        offered_capabilities = {}
        if self._name:
            offered_capabilities[capabilities.SHARED_MEMORY] = self._name
            offered_capabilities[capabilities.DIRECT_RENDER] = ""
        if self._listener is not None:
            offered_capabilities[capabilities.DIRECT_TCP] = str(self._listener.port)
        return offered_capabilities

    async def start(self) -> None:
        if self._name:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(shared_memory.SOCKET_PREFIX + self._name.encode())
            self._listeners.append(
                AuthenticatingListener(listener, self._accept_local, "shared memory")
            )
        if self._listener is not None:
            sockets = self._listener.sockets
            hosts = " and ".join(each.getsockname()[0] for each in sockets)
            port = sockets[0].getsockname()[1]
            self._listeners += [
                AuthenticatingListener(each, self._accept_tcp, "direct TCP") for each in sockets
            ]
            _LOG.info("listening for direct TCP connections on %s, port %d", hosts, port)

    def close_listener(self) -> None:
        """Close the TCP sockets; instead of ``start``, or after it."""
        if self._listener is not None:
            for each in self._listener.sockets:
                each.close()

    async def stop(self) -> None:
        """Stop listening, and close all direct connections after their steps. Idempotent."""
        for listener in self._listeners:
            listener.stop()
        self._tickets.clear()
        await asyncio.gather(*(session.close_direct() for session in self._open.values()))

    def open(
        self, session_id: str, open_direct: OpenDirect, close_direct: CloseDirect
    ) -> Callable[[], None]:
        """Register a session, whose client may connect until the returned function is called."""
        own = _RegisteredSession(open_direct, close_direct)
        # A second session with the same id is a replay.
        self._open.setdefault(session_id, own)

        def close() -> None:
            if self._open.get(session_id) is own:
                del self._open[session_id]

        return close

    def issue_ticket(self, session_id: str, timeout_ms: int) -> Ticket | None:
        """Return a ticket for one connection, replacing an older one; None: no such session.

        Args:
            session_id: Id of the session.
            timeout_ms: Timeout of its steps.
        """
        if self._listener is None or session_id not in self._open:
            return None
        return self._tickets.issue(session_id, timeout_ms)

    async def _accept_local(
        self, client: socket.socket, mark_authenticated: Callable[[], None]
    ) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            data = await read_exactly(client, shared_memory.HELLO_BYTES)
        mark_authenticated()
        hello = shared_memory.ClientHello.unpack(data)
        session = self._open.get(hello.session_id)
        direct = await session.open_once(hello.timeout_ms, None) if session is not None else None
        if direct is None:
            client.send(shared_memory.REFUSED)
            return
        try:
            direct.send_descriptors(client, shared_memory.ACCEPTED)
        except OSError:
            direct.disconnect()
            raise

    async def _accept_tcp(
        self, client: socket.socket, mark_authenticated: Callable[[], None]
    ) -> None:
        async with asyncio.timeout(_HELLO_TIMEOUT_S):
            hello = await read_exactly(client, tcp.HELLO_BYTES)
            ticket_id, client_nonce = tcp.parse_hello(hello)
            issued = self._tickets.take(ticket_id)
            if issued is None:
                return
            mark_authenticated()
            nonce = secrets.token_bytes(tcp.NONCE_BYTES)
            client.send(nonce + issued.ticket.proof(b"endpoint", client_nonce, nonce))
            proof = await read_exactly(client, PROOF_BYTES)
        if not hmac.compare_digest(proof, issued.ticket.proof(b"client", client_nonce, nonce)):
            return
        session = self._open.get(issued.session_id)
        if session is None:
            return
        client.setblocking(True)  # the worker's duplicate shares the flag
        connection = client.dup()
        direct = None
        try:
            direct = await session.open_once(issued.timeout_ms, connection)
            if direct is not None:
                direct.send(tcp.ACCEPTED)
        except OSError:
            if direct is not None:
                direct.disconnect()
            raise
        finally:
            if direct is None:
                connection.close()
