"""Sockets of direct connections between a client and its env worker, and their frames.

A direct connection carries Steps, Renders, and answers. Everything else uses the session's Join
stream, whose rules stay in force. A request has a number, which in decimal is its request id on the
Join stream.

* Request, client to worker: number, timeout, and how many bytes of actions follow.
* Answer, worker to client: number, DONE or FALL_BACK, and how many bytes of a message and of
  results follow. With DONE the message, if any, is a JoinResponse of the edition, whose
  StepResponse has everything that is not among the results. After FALL_BACK the client sends the
  same request, under its id, on the Join stream.

With shared memory, and where the endpoint has the capability DIRECT_RENDER, a request may also be
for pictures of all lanes: it has RENDER in place of the bytes of actions. The message of its answer
is then the pictures' height and width, and the pixels of each lane's, ``(height, width, 3) uint8``.
For anything but such pictures the worker answers FALL_BACK, and Render's answer on the Join stream
is a PNG.

Actions and results have the layout of ``step_buffers.StepBuffers``. With shared memory both
ends map the same buffers, and none follow. A connection that ends without an answer counts as
FALL_BACK.

Handshake of ``rlmesh_ray.shared_memory.v1``: the client sends a greeting to the endpoint's unix
socket, with the session id and the timeout of the client's steps. The answer is the byte 1 with
four descriptors (the step buffers, the socket, the worker's eventfd, the client's), or the byte 0
for a refusal. ``tcp`` has the handshake of the direct TCP transport.
"""

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterator, Sequence

from rlmesh_ray.options import KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S, SHARED_MEMORY, TCP
from rlmesh_ray.polling import WakeupDescriptors
from rlmesh_ray.transport.tcp import enable_keepalive

DONE, FALL_BACK = 0, 1
RENDER = 2**64 - 1

REQUEST = struct.Struct("<QQQ")
"""Number, timeout in ms (0: none), bytes of actions or RENDER."""
ANSWER = struct.Struct("<QIIQ")
"""Number, DONE or FALL_BACK, bytes of the message, bytes of results."""
PICTURE_SIZE = struct.Struct("<II")
"""Height, width."""

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


class DirectSocket:
    """One end of a direct connection: base class of both kinds of socket.

    It owns ``connection``, which is connected and blocks. ``send`` and ``receive`` raise OSError
    where either end is closed; ``close`` is idempotent.
    """

    def __init__(self, connection: socket.socket, eventfd: int | None = None) -> None:
        self.connection = connection
        # Readable when the peer has sent something; None: the socket itself is.
        self._eventfd = eventfd
        descriptor = connection.fileno()
        self.wakeup: WakeupDescriptors | None = WakeupDescriptors(
            descriptor if eventfd is None else eventfd, descriptor
        )
        """Descriptors to poll for data; None: this end is closed."""

    def receive(self, places: Sequence[memoryview], num_received: int) -> int:
        """Receive a part of a frame, without blocking; return its number of bytes.

        ``places`` are for the whole frame, of which ``num_received`` bytes have come before.

        Raises:
            BlockingIOError: No data is available.
        """
        if self._eventfd is not None:
            # Before reading: later data sets the eventfd again. It may still be set for an earlier
            # frame, which was read before the peer had written to the eventfd.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._eventfd)
        if num_received:
            places = list(rest_of(places, num_received))
        count = self.connection.recvmsg_into(places, 0, socket.MSG_DONTWAIT)[0]
        if not count:
            raise ConnectionResetError("the direct connection has ended")
        return count

    def close(self) -> None:
        self.wakeup = None
        self.connection.close()

    def limit_sending(self, timeout_s: float) -> None:
        """Make ``send`` fail when the peer receives nothing for ``timeout_s``."""
        whole_s, part_s = divmod(timeout_s, 1.0)
        limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def hang_up(self) -> None:
        """Shut down both directions, which wakes all readers of the connection."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class EventfdSocket(DirectSocket):
    """A socket whose reader polls an eventfd. It owns the eventfds of both ends.

    When data on a socket wakes its reader, the kernel runs it immediately on the sender's
    processor, expecting the sender to sleep; with an eventfd it does not.
    """

    transport = SHARED_MEMORY

    def __init__(self, connection: socket.socket, eventfd: int, peer_eventfd: int) -> None:
        super().__init__(connection, eventfd)
        self._peer_eventfd = peer_eventfd
        # An unclosed socket closes itself; plain descriptors need a finalizer.
        self._let_go = weakref.finalize(self, _close_all, eventfd, peer_eventfd)
        self._let_go.atexit = False

    def send(self, *parts: bytes | memoryview) -> None:
        """Send ``parts`` in order, and wake the other end."""
        data = b"".join(parts)
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self.connection.send(data, socket.MSG_DONTWAIT)
        # Before the rest, which needs the peer to read: it is beyond the kernel's buffer.
        os.eventfd_write(self._peer_eventfd, 1)
        if sent < len(data):
            self.connection.sendall(memoryview(data)[sent:])

    def close(self) -> None:
        super().close()
        self._let_go()


class TcpSocket(DirectSocket):
    """One end of a direct connection over TCP."""

    transport = TCP

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # As gRPC's keepalive: detects a peer that is gone without closing the connection.
        enable_keepalive(connection, KEEPALIVE_TIME_S, KEEPALIVE_TIMEOUT_S, 1)
        if option := getattr(socket, "TCP_USER_TIMEOUT", None):
            limit_ms = (KEEPALIVE_TIME_S + KEEPALIVE_TIMEOUT_S) * 1000
            connection.setsockopt(socket.IPPROTO_TCP, option, limit_ms)

    def send(self, *parts: bytes | memoryview) -> None:
        views = [memoryview(part) for part in parts]
        num_wanted = sum([view.nbytes for view in views])
        num_sent = self.connection.sendmsg(views)
        while num_sent < num_wanted:
            num_sent += self.connection.sendmsg(list(rest_of(views, num_sent)))


def rest_of(parts: Sequence[memoryview], num_done: int) -> Iterator[memoryview]:
    """Yield what remains of ``parts`` after the first ``num_done`` bytes."""
    for part in parts:
        if num_done < part.nbytes:
            yield part[num_done:] if num_done else part
        num_done = max(0, num_done - part.nbytes)


def _close_all(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
