"""Tickets: what lets a client attach to a direct TCP connection, once and within 30 seconds.

The client of an open session requests a ticket by gRPC (``server.env_service``). Both sides then
prove that they have its key (``tcp``). Shared memory needs no ticket, only the session's id.
"""

import hmac
import secrets
import time
from dataclasses import dataclass, field

PROTOCOL = b"rlmesh-ray-tcp1\n"
KEY_BYTES = 32
TICKET_ID_BYTES = 16
PROOF_BYTES = 32
_TICKET_S = 30.0


@dataclass(frozen=True, slots=True)
class Ticket:
    """A short-lived credential for one connection."""

    ticket_id: bytes
    key: bytes = field(repr=False)
    endpoint: str
    """Id and incarnation of the endpoint that issued it."""

    def proof(self, role: bytes, client_nonce: bytes, endpoint_nonce: bytes) -> bytes:
        """Return the HMAC with which one side proves that it has the key.

        Args:
            role: ``b"client"`` or ``b"endpoint"``.
            client_nonce: The client's nonce for this connection.
            endpoint_nonce: The endpoint's nonce for this connection.
        """
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
    """The tickets that an endpoint has issued, at most one for each session.

    Args:
        endpoint: Id and incarnation of the endpoint.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._issued: dict[bytes, IssuedTicket] = {}

    def issue(self, session_id: str, timeout_ms: int) -> Ticket:
        """Return a ticket for one connection, replacing the session's older one."""
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

    def clear(self) -> None:
        self._issued.clear()
