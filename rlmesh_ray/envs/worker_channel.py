"""WorkerChannel: pickled messages between an endpoint and its worker, over a socket pair.

Both ends are processes of this package; nothing from the network is unpickled here. A message has
no object of a class that the endpoint does not have: infos are user data, and unpickling them must
neither import an environment's modules into the endpoint nor fail there.
"""

import contextlib
import dataclasses
import enum
import io
import pickle
import socket
import struct
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from rlmesh_ray.envs.commands import CallReply, Command, Outcome, ResetReply, StepCommand, StepReply
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.validation import WARNING_KEY, warnings_as_texts

_HEADER = struct.Struct("!Q")
_RECEIVE_BYTES = 64 * 1024
_ARRAY_KINDS = (np.ndarray, np.generic, np.dtype)
_ARRAY_MAKERS = frozenset({"_reconstruct", "_frombuffer", "_mareconstruct", "scalar"})
"""NumPy's functions that pickled arrays and numbers name."""
_MESSAGE_ROOMS = ("rlmesh_ray.envs.", "rlmesh_ray.protocol.", "rlmesh_ray.spaces.")
_NAMED = (type, types.FunctionType, types.BuiltinFunctionType)
# Subclasses, such as named tuples and ordered dicts, become their base, made of these parts.
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
    """One end of the channel; messages alternate, so at most one is in flight in each direction.

    ``send`` and ``receive`` block. ``queue_frame`` and ``advance`` never do: the next call
    continues where they stopped, so that an event loop can wait in between. The blocking stream
    socket is owned; ``decode`` returns the message in the body of a frame.
    """

    def __init__(
        self, connection: socket.socket, decode: Callable[[memoryview], Any] = pickle.loads
    ) -> None:
        self.connection = connection
        self.has_message = False
        """Whether a whole message has arrived."""
        self._decode = decode
        self._unsent = memoryview(b"")
        self._data = bytearray()  # what has arrived and has not been returned
        self._size_bytes = 0  # of the arriving message with its header; 0 while it is unknown
        self._is_over = False

    @property
    def is_sending(self) -> bool:
        return bool(self._unsent)

    def send(self, frame: bytes) -> None:
        """Send a frame from ``encode``; blocks. Raises OSError if the other end is gone."""
        self.connection.sendall(frame)

    def queue_frame(self, frame: bytes = b"") -> None:
        """Send as much as possible without blocking; ``advance`` sends the rest."""
        unsent = self._unsent
        if frame:
            unsent = memoryview(unsent.tobytes() + frame if unsent else frame)
        try:
            while unsent:
                unsent = unsent[self.connection.send(unsent, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            pass
        except OSError:
            # The other end is gone; its last message may still be there for ``receive``.
            unsent = memoryview(b"")
        self._unsent = unsent

    def advance(self) -> bool:
        """Send and receive without blocking; return whether ``receive`` would not block."""
        if self._unsent:
            self.queue_frame()
        try:
            while not (self.has_message or self._is_over):
                self._take(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> Any:
        """Return the next message; blocks.

        Raises:
            EOFError: The other end is gone.
            OSError: The other end is gone, or this end is closed.
            CodecError: It does not decode; the next one can be received.
        """
        if self._unsent:
            self.connection.sendall(self._unsent)
            self._unsent = memoryview(b"")
        while not self.has_message:
            if self._is_over:
                raise EOFError("the other end of the worker's channel is gone")
            self._take(0)
        size, data = self._size_bytes, self._data
        # Taken before it is decoded: the next message can be received even if that fails.
        self._data, self._size_bytes, self.has_message = data[size:], 0, False
        if self._data:
            self._look()
        try:
            return self._decode(memoryview(data)[_HEADER.size : size])
        except Exception as error:  # what a pickle raises may be of any kind
            raise CodecError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close this end and wake the threads that wait on it. Idempotent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _look(self) -> None:
        if not self._size_bytes and len(self._data) >= _HEADER.size:
            self._size_bytes = _HEADER.unpack_from(self._data)[0] + _HEADER.size
        self.has_message = 0 < self._size_bytes <= len(self._data)

    def _take(self, flags: int) -> None:
        try:
            received = self.connection.recv(_RECEIVE_BYTES, flags)
        except BlockingIOError:
            raise
        except OSError:
            received = b""
        self._data += received
        self._is_over = not received
        self._look()


def encode(message: object) -> bytes:
    """Return the frame of ``message``, in which objects of unknown classes are their ``repr``.

    Raises RecursionError where it is nested too deep to be pickled.
    """
    stream = io.BytesIO()
    stream.write(bytes(_HEADER.size))
    _PlainPickler(stream, pickle.HIGHEST_PROTOCOL).dump(message)
    frame = stream.getbuffer()
    _HEADER.pack_into(frame, 0, len(frame) - _HEADER.size)
    return frame.tobytes()


def decode(frame: bytes) -> Any:
    return pickle.loads(memoryview(frame)[_HEADER.size :])


class _PlainPickler(pickle.Pickler):
    """Pickles builtins and classes of NumPy and this package; other objects become plain values."""

    def reducer_override(self, obj: object) -> Any:
        """Return the reduction of ``obj``; exact built-in types bypass this method."""
        if _is_known(obj if isinstance(obj, _NAMED) else type(obj)):
            # Python 3.11.0 to 3.11.3 would name getattr, which is not among what is known.
            return (type(obj), (obj.value,)) if isinstance(obj, enum.Enum) else NotImplemented
        for base, parts in _PLAIN_BASES:
            if isinstance(obj, base):
                return base, (parts(obj),)
        return str, (_text(obj),)


@lru_cache(maxsize=1024)
def _is_known(owner: Any) -> bool:
    """Return whether the endpoint unpickles this class or function as plain data.

    Others of NumPy and of this package might fail there, such as a Generator or an exception.
    """
    if owner in _BUILTINS:
        return True
    root = (owner.__module__ or "").partition(".")[0]
    if not isinstance(owner, type):
        return root == "numpy" and owner.__name__ in _ARRAY_MAKERS
    if root == "numpy":
        return issubclass(owner, _ARRAY_KINDS)
    is_data = dataclasses.is_dataclass(owner) or issubclass(owner, enum.Enum)
    return is_data and owner.__module__.startswith(_MESSAGE_ROOMS)


def _text(obj: object) -> str:
    try:
        return repr(obj)
    except Exception:  # noqa: BLE001  # user code, whose failure must not fail the step
        return f"<{type(obj).__name__}>"


# --- commands ---------------------------------------------------------------------------
# Nearly all steps are plain: of all lanes, without text, and their replies without infos. Their
# data are in the step buffers: the command is the number of its request, and the reply a constant.

_STEP = StepCommand()
_NUMBER = struct.Struct("!cQ")
_STEP_TAG = b"s"  # no pickle of protocol 2 and later begins with it
_REPLY = StepReply({})
_REPLY_BODY = b"r"
_REPLY_FRAME = _HEADER.pack(len(_REPLY_BODY)) + _REPLY_BODY


def command_frame(command: Command, number: int = 0) -> bytes:
    if type(command) is not StepCommand or (
        command.text_columns or command.lanes or command.autoreset_lanes
    ):
        return encode((number, command))
    return _HEADER.pack(_NUMBER.size) + _NUMBER.pack(_STEP_TAG, number)


def decode_command(body: memoryview) -> Any:
    """Return the number and the command in the body of a frame; a plain step is always the same."""
    if len(body) == _NUMBER.size and body[:1] == _STEP_TAG:
        return _NUMBER.unpack(body)[1], _STEP
    return pickle.loads(body)  # a Start has no number


# --- replies ----------------------------------------------------------------------------
# The endpoint decodes and forwards replies in its serving loop, while all other sessions wait.
# Here, in the worker and under the request's deadline, large infos delay their own session only:
# they become what a client would decode, within the limits of ``wire.rlmesh_v1.meta``.

SMALL_BYTES = 2**16
"""A frame up to this size is never slow to decode."""
MAX_BYTES = 2**26
"""Approximate byte limit for text, bytes and arrays in the infos, beyond twice an observation."""
MAX_RESULT_BYTES = 2**24
"""Approximate byte limit for text, bytes and arrays in the results of a call."""
MAX_TEXT = 2**16
"""Characters kept of an error's message, from its start, and of its traceback, from its end."""


def encode_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the frame of ``reply``, limited (``limit_reply``) if it would be large."""
    if (
        type(reply) is StepReply
        and not (reply.text_columns or reply.infos)
        and not any(reply.final_infos.values())
    ):
        return _REPLY_FRAME
    try:
        frame = encode(reply)
        if len(frame) <= SMALL_BYTES:
            return frame
        reply = decode(frame)  # its objects are text now
    except RecursionError:  # nested deeper than pickle can follow
        pass
    return encode(limit_reply(reply, max_bytes))


def decode_reply(body: memoryview) -> Any:
    """Return the reply in the body of a frame; one of a plain step is always the same."""
    return _REPLY if body == _REPLY_BODY else pickle.loads(body)


def limit_reply(reply: Outcome, max_bytes: int = MAX_BYTES) -> Outcome:
    """Return a copy of ``reply`` with infos as a client decodes them.

    ``max_bytes`` limits text, bytes and arrays in its infos together. Results of a call are
    returned whole, or as a Failure.
    """
    if isinstance(reply, Failure):
        return dataclasses.replace(
            reply, message=reply.message[:MAX_TEXT], debug_info=reply.debug_info[-MAX_TEXT:]
        )
    if not isinstance(reply, (CallReply, ResetReply, StepReply)):
        return reply
    # Late: it imports protobuf, which most workers do not need.
    from rlmesh_ray.wire.rlmesh_v1 import meta

    if isinstance(reply, CallReply):
        # Twice, since one entry gets half of the budget.
        budget = meta.MetaBudget(2 * MAX_RESULT_BYTES)
        results = meta.as_decoded({"": list(reply.results)}, budget)[""]
        if budget.left_out.keys() - {meta.TOO_DEEP}:
            return Failure(
                FailureKind.BAD_REQUEST,
                f"it was called, but its result is larger than {MAX_RESULT_BYTES >> 20} MiB or "
                f"{meta.MAX_NODES // 2} values; return less, or arrays in place of lists",
            )
        return CallReply(tuple(results))
    budget = meta.MetaBudget(max_bytes)
    infos = meta.as_decoded(reply.infos, budget)
    if warnings_as_texts(reply.infos) is not reply.infos:
        # Warnings, which are few, have another form in each dialect.
        infos |= {key: reply.infos[key] for key in (WARNING_KEY, f"_{WARNING_KEY}")}
    if isinstance(reply, ResetReply):
        return dataclasses.replace(reply, infos=infos)
    final_infos = {lane: meta.as_decoded(own, budget) for lane, own in reply.final_infos.items()}
    return dataclasses.replace(reply, infos=infos, final_infos=final_infos)
