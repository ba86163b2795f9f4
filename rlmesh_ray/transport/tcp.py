"""The handshake of direct TCP connections, of the capability ``rlmesh_ray.direct_tcp.v1``.

It makes a direct connection (``direct_sockets``) between a client and its env worker on different
machines. The capability's value is a port on the endpoint's host. For each connection the client
requests a ticket by gRPC, which lets it attach once, within 30 seconds. Both sides prove that they
have its key, not sending it:

* Greeting, client to endpoint: the protocol's name, the ticket's id and the client's nonce.
* Endpoint to client: its nonce, and its proof. Client to endpoint: the client's proof.
* Endpoint to client, when the worker has the connection: one byte, 1. Nothing else is sent before.

Any error ends the connection.
"""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from typing import Any

PROTOCOL = b"rlmesh-ray-tcp1\n"
KEY_BYTES = 32
TICKET_ID_BYTES = 16
PROOF_BYTES = 32
_TICKET_S = 30.0
NONCE_BYTES = 16
ACCEPTED = b"\1"

HELLO = struct.Struct(f"{len(PROTOCOL)}s{TICKET_ID_BYTES}s{NONCE_BYTES}s")
"""The greeting: PROTOCOL, id of the ticket, the client's nonce."""
_DIAL_TIMEOUT_S = 3.0
_SHORTEST_DIAL_S = 0.001
"""A timeout of 0.0 would make the socket non-blocking."""
_OTHER_PORT = (
    "its operator can name a port that is reached at that host (--data-address HOST:PORT/ADVERTISED"
    " where another one is mapped to it), or offer none (--transport)"
)
IS_SUPPORTED = (
    hasattr(socket, "MSG_DONTWAIT") and hasattr(select, "poll") and sys.byteorder == "little"
)
"""Whether the system has MSG_DONTWAIT and poll (Windows has not), and is little endian."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A short-lived credential for one connection."""

    ticket_id: bytes
    key: bytes = field(repr=False)
    endpoint: str
    """Id and incarnation of the endpoint that issued it."""

    def proof(self, role: bytes, client_nonce: bytes, endpoint_nonce: bytes) -> bytes:
        """Return the HMAC by which ``b"client"`` or ``b"endpoint"`` proves that it has the key."""
        text = b"\0".join(
            (PROTOCOL, role, self.ticket_id, self.endpoint.encode(), client_nonce + endpoint_nonce)
        )
        return hmac.digest(self.key, text, "sha256")


def new_ticket(endpoint: str) -> Ticket:
    return Ticket(secrets.token_bytes(TICKET_ID_BYTES), secrets.token_bytes(KEY_BYTES), endpoint)


@dataclass(frozen=True, slots=True)
class IssuedTicket:
    """A ticket that no client has used yet."""

    ticket: Ticket
    session_id: str
    timeout_ms: int
    """Timeout of the session's steps."""
    until_s: float


class TicketIssuer:
    """The tickets that an endpoint has issued, at most one for each session."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._issued: dict[bytes, IssuedTicket] = {}

    def issue(self, session_id: str, timeout_ms: int) -> Ticket:
        now_s = time.monotonic()
        self._issued = {
            ticket_id: issued
            for ticket_id, issued in self._issued.items()
            if issued.session_id != session_id and issued.until_s > now_s
        }
        ticket = new_ticket(self._endpoint)
        self._issued[ticket.ticket_id] = IssuedTicket(
            ticket, session_id, timeout_ms, now_s + _TICKET_S
        )
        return ticket

    def take(self, ticket_id: bytes) -> IssuedTicket | None:
        """Use up a ticket; None: it was not issued, or has been used or replaced, or is too old."""
        issued = self._issued.pop(ticket_id, None)
        return None if issued is None or issued.until_s < time.monotonic() else issued


def enable_keepalive(
    connection: Any, idle_s: int = 60, interval_s: int = 15, count: int = 4
) -> None:
    """Have the kernel probe a silent socket, where it has options for that."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": idle_s, "TCP_KEEPINTVL": interval_s, "TCP_KEEPCNT": count}
    for name, value in options.items():
        if option := getattr(socket, name, None):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def connect(host: str, port: int, ticket: Ticket, timeout_s: float) -> socket.socket:
    """Return a connection to the worker of the session that ``ticket`` is for.

    The worker may have to finish a step, and has ``timeout_s``; the endpoint has three seconds.

    Raises:
        ConnectionAbortedError: The endpoint has hung up or was too slow, as on a busy machine.
        OSError: The endpoint cannot be reached, or another one answers.
    """
    connection = _connected(host, port)
    try:
        nonce = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(HELLO.pack(PROTOCOL, ticket.ticket_id, nonce))
        answer = _received(connection, NONCE_BYTES + PROOF_BYTES)
        endpoint_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        if not hmac.compare_digest(proof, ticket.proof(b"endpoint", nonce, endpoint_nonce)):
            raise ConnectionRefusedError(f"what listens there is another endpoint; {_OTHER_PORT}")
        connection.sendall(ticket.proof(b"client", nonce, endpoint_nonce))
        connection.settimeout(timeout_s)
        if _received(connection, len(ACCEPTED)) != ACCEPTED:
            raise ConnectionRefusedError("the endpoint has refused the connection")
        connection.settimeout(None)
        return connection
    except BaseException:
        connection.close()
        raise


def _connected(host: str, port: int) -> socket.socket:
    """Return a connection to one of the addresses of ``host``, which share the timeout.

    Raises:
        OSError: None can be reached in time.
    """
    end_s = time.monotonic() + _DIAL_TIMEOUT_S
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        while True:
            family, kind, protocol, _, address = addresses.pop(0)
            # Each address gets its share of the remaining time.
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
    """Return the next ``size`` bytes; the timeout of ``connection`` covers all of them.

    Raises:
        ConnectionAbortedError: They do not come, or not in time.
    """
    end_s = time.monotonic() + (connection.gettimeout() or 0.0)
    data = b""
    while len(data) < size:
        received = b""
        with contextlib.suppress(TimeoutError):
            received = connection.recv(size - len(data))
        if not received or time.monotonic() > end_s:
            raise ConnectionAbortedError("the endpoint has hung up, or was too slow")
        data += received
    return data
