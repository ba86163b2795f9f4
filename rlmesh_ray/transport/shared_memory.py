"""The capability ``rlmesh_ray.shared_memory.v1`` on the wire: how a client gets shared memory.

It makes a direct road (``transport.frames``) of a socket between a client and the worker that steps
its lanes, with an eventfd at each end (``EventfdSocket``), and a ``StepBuffers`` that both map.

Greeting, client to endpoint, on the endpoint's socket for that: the session id, then the timeout
of the client's steps. Answered with one byte: 1 and four descriptors (the block, the socket, the
worker's eventfd, the client's), or 0, and there is none.
"""

import contextlib
import os
import socket
import struct
import weakref
from dataclasses import dataclass
from typing import Self

from rlmesh_ray.options import SHARED_MEMORY
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.transport.frames import DirectSocket

SESSION_ID_BYTES = 32
"""A session id in ASCII."""
SOCKET_PREFIX = b"\0rlmesh-ray-roads-"
"""Of the endpoint's socket, in the abstract namespace; what follows is the capability's value."""
SOCKET_NAME_LENGTH = 32
"""Hexadecimal digits."""

ACCEPTED, REFUSED = b"\1", b"\0"
NUM_DESCRIPTORS = 4

_HELLO = struct.Struct(f"<{SESSION_ID_BYTES}sQ")
HELLO_BYTES = _HELLO.size


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a client says first."""

    session_id: str
    timeout_ms: int

    def pack(self) -> bytes:
        """Return the bytes."""
        return _HELLO.pack(self.session_id.encode("ascii"), self.timeout_ms)

    @classmethod
    def unpack(cls, data: bytes) -> Self:
        """Return what ``data``, of the right size, says; whatever it is, it is some text."""
        session_id, timeout_ms = _HELLO.unpack(data)
        return cls(session_id.decode("ascii", "replace"), timeout_ms)


def socket_address(name: str) -> bytes | None:
    """Return where an endpoint that has told ``name`` listens; None: it is no such name."""
    is_name = len(name) == SOCKET_NAME_LENGTH and set(name) <= set("0123456789abcdef")
    return SOCKET_PREFIX + name.encode() if is_name else None


class EventfdSocket(DirectSocket):
    """A socket whose reader waits for an eventfd instead.

    To be woken by a socket takes the processor from who has sent on it, since the kernel expects
    him to go to sleep at once; an eventfd does not.

    Args:
        connection: Owned.
        eventfd: The descriptor of our own; owned.
        peer_eventfd: Of the other end's; owned.
    """

    transport = SHARED_MEMORY

    def __init__(self, connection: socket.socket, eventfd: int, peer_eventfd: int) -> None:
        super().__init__(connection)
        self._eventfd = eventfd
        self._peer_eventfd = peer_eventfd
        # Also where nobody closes it: a socket closes itself then, and a number does not.
        self._let_go = weakref.finalize(self, _close_all, eventfd, peer_eventfd)
        self._let_go.atexit = False

    @property
    def wakeup(self) -> WakeupDescriptors | None:
        """What tells that something has been sent; None: this end is closed."""
        return WakeupDescriptors(self._eventfd, self.connection.fileno()) if self.is_open else None

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts``, one after the other, and wake the other end.

        Raises:
            OSError: The other end is gone, or this one closed.
        """
        data = b"".join(parts)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(data, socket.MSG_DONTWAIT)
        # Before the rest: what is larger than the kernel's buffer leaves only as it is read.
        os.eventfd_write(self._peer_eventfd, 1)
        if sent < len(data):
            self.connection.sendall(memoryview(data)[sent:])

    def clear(self) -> None:
        """Reset the eventfd of this end, whether it was set or not."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._eventfd)

    def close(self) -> None:
        """Close this end. Idempotent."""
        self.connection.close()
        self._let_go()


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
