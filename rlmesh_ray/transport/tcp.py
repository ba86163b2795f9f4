"""The capability ``rlmesh_ray.direct_tcp.v1`` on the wire: how a client gets a TCP connection.

It makes a direct road (``transport.frames``) between a client and the worker that steps its lanes,
from one machine to another. The capability's value is a port, at the host where the client has
found the endpoint. For each connection the client asks the endpoint, by gRPC, for a ``Ticket``,
and both prove with its key, which is not shown, that they have it:

* Greeting, client to endpoint: the protocol's name, the ticket's id and the client's nonce.
* Endpoint to client: its nonce, and its proof. Client to endpoint: the client's proof.
* Endpoint to client, when the worker has the connection: one byte, 1. Nothing else is sent before.

Whatever is wrong ends the connection.
"""

import hmac
import secrets
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field

from rlmesh_ray.options import TCP
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.transport.frames import DirectSocket, send_all

PROTOCOL = b"rlmesh-ray-tcp1\n"
NONCE_BYTES = 16
KEY_BYTES = 32
TICKET_ID_BYTES = 16
PROOF_BYTES = 32
ACCEPTED = b"\1"

_HELLO = struct.Struct(f"{len(PROTOCOL)}s{TICKET_ID_BYTES}s{NONCE_BYTES}s")
HELLO_BYTES = _HELLO.size
_DIAL_TIMEOUT_S = 1.0
_SHORTEST_DIAL_S = 0.001
"""0.0 would not wait at all."""
_OTHER_PORT = (
    "its operator can name a port that is reached at that host (--data-address, --data-advertise), "
    "or offer none (--transport)"
)
# As gRPC's keepalive: another end that is gone is noticed although nothing says so.
_KEEPALIVE_OPTIONS = {
    "TCP_KEEPIDLE": 10,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 1,
    "TCP_USER_TIMEOUT": 15_000,
}

IS_SUPPORTED = (
    hasattr(socket, "MSG_DONTWAIT") and hasattr(select, "poll") and sys.byteorder == "little"
)
"""Whether this system has what it takes (Windows does not), and the byte order of the columns."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Lets one connection in, once, for a short time."""

    ticket_id: bytes
    key: bytes = field(repr=False)
    endpoint: str
    """Which endpoint it is of, and which of its lives."""

    def proof(self, role: bytes, client_nonce: bytes, endpoint_nonce: bytes) -> bytes:
        """Return what shows that its maker has the key.

        Args:
            role: ``b"client"`` or ``b"endpoint"``.
            client_nonce: The client's, of this connection.
            endpoint_nonce: The endpoint's.
        """
        text = b"\0".join(
            (PROTOCOL, role, self.ticket_id, self.endpoint.encode(), client_nonce + endpoint_nonce)
        )
        return hmac.digest(self.key, text, "sha256")


def new_ticket(endpoint: str) -> Ticket:
    """Return a ticket that nobody has had."""
    return Ticket(secrets.token_bytes(TICKET_ID_BYTES), secrets.token_bytes(KEY_BYTES), endpoint)


def parse_hello(data: bytes) -> tuple[bytes, bytes]:
    """Return the ticket id and the client's nonce in a greeting of the right size.

    Raises:
        ConnectionRefusedError: It is no greeting of this protocol.
    """
    protocol, ticket_id, nonce = _HELLO.unpack(data)
    if protocol != PROTOCOL:
        raise ConnectionRefusedError("this is no client of rlmesh-ray")
    return ticket_id, nonce


class TcpSocket(DirectSocket):
    """One end of a direct road over TCP.

    Args:
        connection: Connected, in blocking mode; owned.
    """

    transport = TCP

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE_OPTIONS.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def limit_sending(self, timeout_s: float) -> None:
        """Have ``send`` fail where the other end takes nothing for so long."""
        whole_s, part_s = divmod(timeout_s, 1.0)
        limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    @property
    def wakeup(self) -> WakeupDescriptors | None:
        """What tells that something has been sent; None: this end is closed."""
        descriptor = self.connection.fileno()
        return WakeupDescriptors(descriptor, descriptor) if self.is_open else None

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts``, one after the other.

        Raises:
            OSError: The other end is gone, or this one closed.
        """
        send_all(self.connection, parts)

    def clear(self) -> None:
        """Take notice that one has been woken: what has arrived keeps the socket readable."""

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.connection.close()


def connect(host: str, port: int, ticket: Ticket, timeout_s: float) -> TcpSocket:
    """Return a connection to the worker of the session that ``ticket`` is for.

    Args:
        host: The endpoint's.
        port: Of its capability.
        ticket: From it.
        timeout_s: How long the worker may take, which may be at a step; to reach the endpoint may
            take a second.

    Raises:
        OSError: It cannot be reached, or it is another one.
    """
    connection = _connected(host, port)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(_HELLO.pack(PROTOCOL, ticket.ticket_id, nonce))
        answer = _received(connection, NONCE_BYTES + PROOF_BYTES)
        endpoint_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, ticket.proof(b"endpoint", nonce, endpoint_nonce)):
            raise ConnectionRefusedError(f"what listens there is another endpoint; {_OTHER_PORT}")
        connection.sendall(ticket.proof(b"client", nonce, endpoint_nonce))
        connection.settimeout(timeout_s)
        if _received(connection, len(ACCEPTED)) != ACCEPTED:
            raise ConnectionRefusedError("the endpoint has refused the connection")
        connection.settimeout(None)
        return TcpSocket(connection)
    except BaseException:
        connection.close()
        raise


def _connected(host: str, port: int) -> socket.socket:
    """Return a connection to one of the addresses of ``host``; they share the time.

    Raises:
        OSError: None can be reached in time.
    """
    end_s = time.monotonic() + _DIAL_TIMEOUT_S
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        while True:
            family, kind, protocol, _, address = addresses.pop(0)
            # Those that say nothing leave some time for the others.
            part_s = max(end_s - time.monotonic(), 0.0) / (1 + len(addresses))
            connection = socket.socket(family, kind, protocol)
            try:
                connection.settimeout(max(part_s, _SHORTEST_DIAL_S))
                connection.connect(address)
            except OSError:
                connection.close()
                if not addresses:
                    raise
            else:
                connection.settimeout(_DIAL_TIMEOUT_S)
                return connection
    except OSError as error:
        raise ConnectionError(f"{error}; {_OTHER_PORT}") from error


def _received(connection: socket.socket, size: int) -> bytes:
    """Return the next ``size`` bytes, all of them within the timeout of ``connection``."""
    end_s = time.monotonic() + (connection.gettimeout() or 0.0)
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received or time.monotonic() > end_s:
            raise ConnectionRefusedError("the endpoint has hung up, or was too slow")
        data += received
    return data
