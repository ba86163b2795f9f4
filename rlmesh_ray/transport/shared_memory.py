"""The shared-memory transport: handshake of ``rlmesh_ray.shared_memory.v1``, and its socket.

It makes a direct connection (``direct_frames``): a socket between a client and its env worker,
with an eventfd for each end (``EventfdSocket``), and ``StepBuffers`` that both map.

Greeting, client to endpoint, on the endpoint's unix socket: the session id, and the timeout of the
client's steps. Answer: the byte 1 with four descriptors (the step buffers, the socket, the worker's
eventfd, the client's), or the byte 0 for a refusal.
"""

import contextlib
import os
import socket
import struct
import weakref

from rlmesh_ray.options import SHARED_MEMORY
from rlmesh_ray.transport.direct_frames import DirectSocket

SESSION_ID_BYTES = 32
"""Length of a session id in ASCII."""
SOCKET_PREFIX = b"\0rlmesh-ray-roads-"
"""Prefix of the endpoint's abstract unix socket, before the capability's value; a wire name."""
SOCKET_NAME_LENGTH = 32
"""Length of the capability's value, in hexadecimal digits."""

ACCEPTED, REFUSED = b"\1", b"\0"
NUM_DESCRIPTORS = 4

HELLO = struct.Struct(f"<{SESSION_ID_BYTES}sQ")
"""The greeting: session id, timeout in ms."""


def socket_address(name: str) -> bytes | None:
    """Return the socket's address for a value of the capability; None where that is invalid."""
    is_name = len(name) == SOCKET_NAME_LENGTH and set(name) <= set("0123456789abcdef")
    return SOCKET_PREFIX + name.encode() if is_name else None


class EventfdSocket(DirectSocket):
    """A socket whose reader polls an eventfd.

    When data on a socket wakes its reader, the kernel runs that at once on the sender's processor,
    expecting the sender to sleep; an eventfd does not do so.

    Args:
        connection: Connected socket; owned.
        eventfd: Descriptor of this end's eventfd; owned.
        peer_eventfd: Descriptor of the other end's eventfd; owned.
    """

    transport = SHARED_MEMORY

    def __init__(self, connection: socket.socket, eventfd: int, peer_eventfd: int) -> None:
        super().__init__(connection, eventfd)
        self._eventfd = eventfd
        self._peer_eventfd = peer_eventfd
        # An unclosed socket closes itself; plain descriptors need a finalizer.
        self._let_go = weakref.finalize(self, _close_all, eventfd, peer_eventfd)
        self._let_go.atexit = False

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts`` in order, and wake the other end.

        Raises:
            OSError: Either end is closed.
        """
        data = b"".join(parts)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(data, socket.MSG_DONTWAIT)
        # Before the rest, which needs the peer to read: it is beyond the kernel's buffer.
        os.eventfd_write(self._peer_eventfd, 1)
        if sent < len(data):
            self.connection.sendall(memoryview(data)[sent:])

    def clear(self) -> None:
        """Reset this end's eventfd, which need not be set."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def close(self) -> None:
        """Close this end. Idempotent."""
        super().close()
        self._let_go()


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
