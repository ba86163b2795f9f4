"""What goes over a direct road: requests for steps, and answers to those that have succeeded.

Only Step travels there, and only its success comes back; everything else happens on the session's
Join stream, whose rules stay in force. A request has a number; its request id on the stream would
be that number in decimal.

* Request, client to worker: number, timeout, and how many bytes of actions follow.
* Answer, worker to client: the number, DONE or FALL_BACK, how many bytes of results follow, and
  how many of a message. DONE: the message, if there is one, is a JoinResponse of the edition whose
  StepResponse has all that is not among the results. FALL_BACK: the client sends the same
  request, under its id, on the stream, and gets the answer there.

Actions and results are as they lie in a ``spaces.step_buffers.StepBuffers``, of which over shared
memory both ends have the same, and nothing follows. When the connection ends without an answer, the
client does as after FALL_BACK.
"""

import contextlib
import socket
import struct
from collections.abc import Iterator, Sequence

DONE, FALL_BACK = 0, 1

_REQUEST = struct.Struct("<QQQ")
_ANSWER = struct.Struct("<QIIQ")

REQUEST_BYTES = _REQUEST.size
ANSWER_BYTES = _ANSWER.size

pack_request = _REQUEST.pack
"""Number, timeout in ms (0: none), bytes of actions -> bytes."""
unpack_request = _REQUEST.unpack
pack_answer = _ANSWER.pack
"""Number, DONE or FALL_BACK, bytes of the message, bytes of results -> bytes."""
unpack_answer = _ANSWER.unpack


class DirectSocket:
    """One end of a direct road: what both kinds of socket share.

    Args:
        connection: Connected, in blocking mode; owned.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    @property
    def is_open(self) -> bool:
        """Whether this end is."""
        return self.connection.fileno() >= 0

    def hang_up(self) -> None:
        """Say nothing more and hear nothing more; whoever waits for this end wakes up."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


class FrameReader:
    """Receives bytes into places that are known before, as they come.

    Args:
        places: Where the bytes go, one place after the other.
    """

    def __init__(self, *places: memoryview) -> None:
        self._places = places
        self._num_wanted = sum(place.nbytes for place in places)
        self.num_received = 0
        """Since the beginning, or since it was set to 0."""

    @property
    def is_complete(self) -> bool:
        """Whether all places are full."""
        return self.num_received == self._num_wanted

    def receive(self, connection: socket.socket) -> None:
        """Receive once, what is there.

        Raises:
            BlockingIOError: Nothing is there.
            OSError: The other end is gone, or this one closed.
        """
        places = self._places
        if self.num_received:
            places = tuple(_after(self.num_received, places))
        count = connection.recvmsg_into(places, 0, socket.MSG_DONTWAIT)[0]
        if not count:
            raise ConnectionResetError("the road has ended")
        self.num_received += count


def send_all(connection: socket.socket, parts: Sequence[bytes | memoryview]) -> None:
    """Send ``parts``, one after the other; blocks.

    Raises:
        OSError: The other end is gone, or this one closed.
    """
    views = [memoryview(part) for part in parts]
    num_wanted = sum(view.nbytes for view in views)
    num_sent = 0
    while num_sent < num_wanted:
        num_sent += connection.sendmsg(list(_after(num_sent, views)))


def _after(num_done: int, places: Sequence[memoryview]) -> Iterator[memoryview]:
    """Yield what is left of ``places`` after the first ``num_done`` bytes."""
    for place in places:
        if num_done < place.nbytes:
            yield place[num_done:] if num_done else place
        num_done = max(0, num_done - place.nbytes)
