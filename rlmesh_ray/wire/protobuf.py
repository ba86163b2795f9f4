"""Protobuf parsing with this package's error, and the primitives of hand-written codecs."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.messages import MalformedRequest

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


Descriptor = Any
"""``google.protobuf.descriptor.Descriptor``, of either implementation."""

_LARGE_BYTES = 2**21
MOST_PARTS = 2**16 + 2**12
"""Of a large message, unless its reader says otherwise."""


def parse(kind: type[MessageT], data: bytes, *, most_parts: int | None = MOST_PARTS) -> MessageT:
    """Return the message of type ``kind`` that ``data`` holds, from a peer; raises CodecError.

    A message is parsed in one call that no other thread interrupts, and can take 25 times its
    bytes: one of some megabytes may have ``most_parts`` parts (None: any number).
    """
    if most_parts is not None and len(data) > _LARGE_BYTES:
        _check_parts(kind.DESCRIPTOR, data, most_parts)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise CodecError(f"{len(data)} bytes are no {name}: {error}") from error


def _check_parts(root: Descriptor, data: bytes, most_parts: int) -> None:
    """Count the fields of a message and of those in it; raises CodecError for too many."""
    num_left = most_parts
    unseen = [(root, 0, len(data))]
    try:
        while unseen:
            kind, at, end = unseen.pop()
            inner = _inner(kind)
            while at < end:
                num_left -= 1
                if num_left < 0:
                    raise CodecError(
                        f"a message of {len(data)} bytes has more than {most_parts} parts; send "
                        "less at a time"
                    )
                tag, at = varint_at(data, at)
                size, at = size_at(data, at, tag & 7)
                part = inner.get(tag >> 3)
                if part is not None and tag & 7 == _BYTES:
                    unseen.append((part, at, min(at + size, end)))
                at += size
    except (IndexError, KeyError):  # it is cut short, or has groups, which no message here has
        raise CodecError(f"{len(data)} bytes are no {root.full_name}") from None


_VARINT, _BYTES = 0, 2
_SIZES = {1: 8, 5: 4}
"""Of the values of the wire types that are neither."""


def size_at(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """Return the length of a value, and where it begins; a varint is skipped, and has 0 left.

    Raises IndexError where ``data`` ends before, KeyError for a wire type that is not used here.
    """
    if kind == _BYTES:
        return varint_at(data, at)
    return (0, varint_at(data, at)[1]) if kind == _VARINT else (_SIZES[kind], at)


def varint_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, and where it ends. Raises IndexError if there is none."""
    number = 0
    for shift in range(0, 70, 7):
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
    raise IndexError


@lru_cache(maxsize=256)
def _inner(kind: Descriptor) -> dict[int, Descriptor]:
    """Return the messages in a message that may have many parts, by their fields' numbers."""
    return {
        field.number: field.message_type
        for field in kind.fields
        if field.message_type
        and any(each.is_repeated or each.message_type for each in field.message_type.fields)
    }


MAX_LANES = 2**16
"""Most lanes of a session, over all routes with a policy, which may remember something about each
of them: a client can claim any number in one request."""


def few(values: Sequence[T], what: str, most: int = MAX_LANES) -> tuple[T, ...]:
    """Return the values of a repeated field of a message from a peer.

    Raises CodecError for more than ``most``, which would keep every other session waiting.
    """
    if len(values) > most:
        raise CodecError(f"{len(values)} {what}, and {most} are the limit")
    return tuple(values)


# --- writing by hand -------------------------------------------------------------------


def varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    if number < 0x200000:
        return bytes((number & 0x7F | 0x80, number >> 7 & 0x7F | 0x80, number >> 14))
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def as_utf8(text: str) -> str:
    """Return ``text`` with question marks for lone surrogates, which UTF-8 cannot encode."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")


def field(tag: bytes, data: bytes) -> bytes:
    """Return a length-delimited field; nothing for empty ``data``."""
    size = len(data)
    if size < 0x80:
        return b"%b%c%b" % (tag, size, data) if data else b""
    return b"%b%b%b" % (tag, varint(size), data)


@lru_cache(maxsize=64)
def value_head(tag: bytes, size: int) -> bytes:
    """Return the tags and lengths before the ``size`` bytes of a ``SpaceValue`` in a field."""
    head = b"\x0a" + varint(size)  # SpaceValueBytes.data
    head = b"\x0a" + varint(len(head) + size) + head  # SpaceValue.bytes
    return tag + varint(len(head) + size) + head


Readers = Mapping[str, Callable[[Any], T]]
"""Decoder of each kind of message, by the name of its field in the oneof."""


def read_request(frame: type[Message], readers: Readers[T], data: bytes) -> T | MalformedRequest:
    """Return the request in ``data``. Never raises: every frame gets an in-band response.

    ``frame`` has ``request_id`` and the oneof ``kind``; the readers may raise CodecError.
    """
    try:
        message: Any = parse(frame, data)
    except CodecError as error:
        return MalformedRequest("", str(error))
    kind = message.WhichOneof("kind")
    if kind is None:
        return MalformedRequest(message.request_id, "the frame holds no kind of request known here")
    try:
        return readers[kind](message)
    except CodecError as error:
        return MalformedRequest(message.request_id, f"{kind}: {error}")


def read_response(frame: type[Message], readers: Readers[T], data: bytes) -> T:
    """Return the response in ``data``; arguments as for ``read_request``. Raises CodecError."""
    # Infos may have very many values, and the client has chosen the server.
    message: Any = parse(frame, data, most_parts=None)
    kind = message.WhichOneof("kind")
    if kind is None:
        raise CodecError("the frame holds no kind of response known here")
    return readers[kind](message)
