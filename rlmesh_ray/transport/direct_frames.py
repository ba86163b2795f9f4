"""Frames of a direct connection between a client and its env worker: Steps, Renders, and answers.

Everything else uses the session's Join stream, whose rules stay in force. A request has a number,
which in decimal is its request id on the Join stream.

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
"""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence

from rlmesh_ray.polling import WakeupDescriptors

DONE, FALL_BACK = 0, 1
RENDER = 2**64 - 1

REQUEST = struct.Struct("<QQQ")
"""Number, timeout in ms (0: none), bytes of actions or RENDER."""
ANSWER = struct.Struct("<QIIQ")
"""Number, DONE or FALL_BACK, bytes of the message, bytes of results."""
PICTURE_SIZE = struct.Struct("<II")
"""Height, width."""


class DirectSocket:
    """One end of a direct connection: base class of both kinds of socket.

    Args:
        connection: Connected, blocking socket; owned.
        eventfd: Readable when the peer has sent something; None: the socket itself is.
    """

    def __init__(self, connection: socket.socket, eventfd: int | None = None) -> None:
        self.connection = connection
        descriptor = connection.fileno()
        self.wakeup: WakeupDescriptors | None = WakeupDescriptors(
            descriptor if eventfd is None else eventfd, descriptor
        )
        """Descriptors to poll for data; None: this end is closed."""

    def close(self) -> None:
        """Close this end. Idempotent."""
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


class FrameReader:
    """Receives one frame into preallocated buffers, in as many reads as it takes.

    Args:
        places: The buffers, in order.
    """

    def __init__(self, *places: memoryview) -> None:
        self._places = places
        self._num_wanted = sum(place.nbytes for place in places)
        self.num_received = 0
        """Bytes of the present frame; set it to 0 for the next one."""

    @property
    def is_complete(self) -> bool:
        return self.num_received == self._num_wanted

    def receive(self, connection: socket.socket) -> None:
        """Receive once, without blocking.

        Raises:
            BlockingIOError: No data is available.
            OSError: Either end is closed.
        """
        places = self._places
        if self.num_received:
            places = tuple(_after(self.num_received, places))
        count = connection.recvmsg_into(places, 0, socket.MSG_DONTWAIT)[0]
        if not count:
            raise ConnectionResetError("the direct connection has ended")
        self.num_received += count


def send_all(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send ``parts`` in order; blocks.

    Raises:
        OSError: Either end is closed.
    """
    views = [memoryview(part) for part in parts]
    num_wanted = sum(view.nbytes for view in views)
    num_sent = 0
    while num_sent < num_wanted:
        num_sent += connection.sendmsg(list(_after(num_sent, views)))


def _after(num_done: int, places: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield the rest of ``places`` after the first ``num_done`` bytes."""
    for place in places:
        if num_done < place.nbytes:
            yield place[num_done:] if num_done else place
        num_done = max(0, num_done - place.nbytes)
