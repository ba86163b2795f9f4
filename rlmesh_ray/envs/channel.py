"""The road between an endpoint and its worker: pickled messages over a socket pair.

Both ends are our own processes, started by us; nothing from the network comes here.
Rule: a message contains no object whose class the endpoint does not know. Infos are user data,
and unpickling must neither import an environment's modules into the endpoint nor fail there.
"""

import contextlib
import io
import pickle
import socket
import struct
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


class Channel:
    """One end of the road; messages alternate, so at most one is on its way in each direction.

    Args:
        connection: A connected, blocking stream socket; owned from now on.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    @property
    def connection(self) -> socket.socket:
        """The socket."""
        return self._connection

    def send(self, frame: bytes) -> None:
        """Send what ``encode`` gave.

        Raises:
            OSError: The other end is gone.
        """
        self._connection.sendall(frame)

    def receive(self) -> Any:
        """Return the next message; blocks.

        Raises:
            EOFError: The other end is gone.
            OSError: The same, or this end is closed.
        """
        data = self._connection.recv(_RECEIVE_BYTES)
        while len(data) < _HEADER.size:
            data += self._more(_HEADER.size - len(data)) if data else _end()
        (size,) = _HEADER.unpack_from(data)
        missing = size + _HEADER.size - len(data)
        if missing > 0:
            buffer = bytearray(size + _HEADER.size)
            buffer[: len(data)] = data
            self._fill(memoryview(buffer)[len(data) :])
            return pickle.loads(memoryview(buffer)[_HEADER.size :])
        return pickle.loads(memoryview(data)[_HEADER.size :])

    def close(self) -> None:
        """Close this end and wake whoever waits on it; may be called twice."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _more(self, limit_bytes: int) -> bytes:
        return self._connection.recv(limit_bytes) or _end()

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._connection.recv_into(view)
            if not count:
                _end()
            view = view[count:]


def encode(message: object) -> bytes:
    """Return the frame of ``message``; objects of foreign classes become their ``repr``."""
    stream = io.BytesIO()
    stream.write(bytes(_HEADER.size))
    _PlainPickler(stream, pickle.HIGHEST_PROTOCOL).dump(message)
    frame = stream.getbuffer()
    _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size)
    return frame.tobytes()


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


def _end() -> bytes:
    raise EOFError("the other end of the worker's channel is gone")
