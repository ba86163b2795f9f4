"""The road between an endpoint and its worker: pickled messages over a socket pair.

Both ends are our own processes, started by us; nothing from the network comes here.
Rule: a message contains no object whose class the endpoint does not know. Infos are user data,
and unpickling must neither import an environment's modules into the endpoint nor fail there.
"""

import contextlib
import io
import pickle
import select
import socket
import struct
import time
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_HEADER = struct.Struct("!Q")
_RECEIVE_BYTES = 64 * 1024
_KNOWN_ROOTS = frozenset({"numpy", "rlmesh_ray"})
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# What subclasses become, such as named tuples and ordered dicts: the base, made of these parts.
_PLAIN_BASES: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (dict, lambda value: list(value.items())),
    (list, list),
    (tuple, list),
    (set, list),
    (frozenset, list),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (int, int.__int__),
    (float, float.__float__),
)
_BUILTINS: frozenset[object] = frozenset(
    [base for base, _ in _PLAIN_BASES] + [bytearray, complex, range]
)


class WorkerChannel:
    """One end of the road; messages alternate, so at most one is on its way in each direction.

    ``send`` and ``receive`` block. ``queue_frame``, ``try_send`` and ``try_receive`` never do: the
    next call goes on where they had to stop, so that an event loop can wait in between.

    Args:
        connection: A connected, blocking stream socket; owned from now on.
        decode: Returns the message in the body of a frame.
    """

    def __init__(
        self, connection: socket.socket, decode: Callable[[memoryview], Any] = pickle.loads
    ) -> None:
        self._connection = connection
        self._decode = decode
        self._unsent = memoryview(b"")
        # What has arrived: the first _num_arrived bytes, then room for the rest of a large message.
        self._data = bytearray()
        self._num_arrived = 0
        self._is_over = False

    @property
    def connection(self) -> socket.socket:
        """The socket."""
        return self._connection

    @property
    def is_sending(self) -> bool:
        """Whether part of a frame is still waiting to leave."""
        return bool(self._unsent)

    @property
    def has_message(self) -> bool:
        """Whether a whole message has arrived."""
        return 0 < self._size_bytes <= self._num_arrived

    def send(self, frame: bytes) -> None:
        """Send what ``encode`` gave; blocks.

        Raises:
            OSError: The other end is gone.
        """
        self._connection.sendall(frame)

    def queue_frame(self, frame: bytes) -> None:
        """Send as much of ``frame`` as leaves at once; ``try_send`` sends the rest."""
        self._unsent = memoryview(self._unsent.tobytes() + frame if self._unsent else frame)
        self.try_send()

    def try_send(self) -> None:
        """Send as much as leaves at once of what is waiting."""
        try:
            while self._unsent:
                count = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
                self._unsent = self._unsent[count:]
        except BlockingIOError:
            pass
        except OSError:
            # The other end is gone; there may be a last message of it, so pulling tells.
            self._unsent = memoryview(b"")

    def try_receive(self) -> bool:
        """Take what has arrived; return whether ``receive`` would not block."""
        try:
            while not (self.has_message or self._is_over):
                self._take(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def wait(self, timeout_s: float) -> bool:
        """Push and pull until ``receive`` would not block; False when that takes too long."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.try_send()
            if self.try_receive():
                return True
            # Not select: it fails for descriptors above 1023.
            waiting = select.poll()
            waiting.register(
                self._connection, select.POLLIN | (select.POLLOUT if self.is_sending else 0)
            )
            if not waiting.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return False

    def receive(self) -> Any:
        """Return the next message; blocks.

        Raises:
            EOFError: The other end is gone.
            OSError: The same, or this end is closed.
        """
        if self._unsent:
            self._connection.sendall(self._unsent)
            self._unsent = memoryview(b"")
        while not self.has_message:
            if self._is_over:
                raise EOFError("the other end of the worker's channel is gone")
            self._take(0)
        size = self._size_bytes
        message = self._decode(memoryview(self._data)[_HEADER.size : size])
        self._data = self._data[size : self._num_arrived]
        self._num_arrived = len(self._data)
        return message

    def close(self) -> None:
        """Close this end and wake whoever waits on it; may be called twice."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @property
    def _size_bytes(self) -> int:
        """Of the message that is arriving, with its header; 0 while that is not known."""
        if self._num_arrived < _HEADER.size:
            return 0
        (size,) = _HEADER.unpack_from(self._data)
        return int(size) + _HEADER.size

    def _take(self, flags: int) -> None:
        """Receive once, into the right place."""
        size = self._size_bytes
        try:
            if size:
                self._data.extend(bytes(size - len(self._data)))
                with memoryview(self._data) as whole:
                    count = self._connection.recv_into(whole[self._num_arrived :], 0, flags)
            else:
                received = self._connection.recv(_RECEIVE_BYTES, flags)
                self._data += received
                count = len(received)
        except BlockingIOError:
            raise
        except OSError:
            count = 0
        self._num_arrived += count
        self._is_over = not count


def encode(message: object) -> bytes:
    """Return the frame of ``message``. Objects of foreign classes become their ``repr``.

    Raises:
        RecursionError: It is nested too deep to be pickled.
    """
    stream = io.BytesIO()
    stream.write(bytes(_HEADER.size))
    _PlainPickler(stream, pickle.HIGHEST_PROTOCOL).dump(message)
    frame = stream.getbuffer()
    _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size)
    return frame.tobytes()


def decode(frame: bytes) -> Any:
    """Return the message in what ``encode`` gave."""
    return pickle.loads(memoryview(frame)[_HEADER.size :])


def frame_of(body: bytes) -> bytes:
    """Return the frame of a body that is no pickle; see ``WorkerChannel``'s ``decode``."""
    return _HEADER.pack(len(body)) + body


class _PlainPickler(pickle.Pickler):
    """Keeps built-in values, numpy's and ours; what else it meets is made plain."""

    def reducer_override(self, obj: object) -> Any:
        """Say how to pickle ``obj``; plain values of the exact built-in types never come here."""
        if _is_known(obj if isinstance(obj, _NAMED) else type(obj)):
            return NotImplemented
        for base, parts in _PLAIN_BASES:
            if isinstance(obj, base):
                return base, (parts(obj),)
        return str, (_text(obj),)


@lru_cache(maxsize=1024)
def _is_known(owner: Any) -> bool:
    """Return whether the endpoint finds this class or function by its name."""
    if owner in _BUILTINS:
        return True
    root = (owner.__module__ or "").partition(".")[0]
    return root in _KNOWN_ROOTS and "<" not in owner.__qualname__


def _text(obj: object) -> str:
    try:
        return repr(obj)
    except Exception:  # noqa: BLE001  # user code; its failure must not cost the step
        return f"<{type(obj).__name__}>"
