"""Protobuf parsing with this package's error, and the primitives of hand-written codecs."""

from functools import lru_cache
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from rlmesh_ray.errors import CodecError

MessageT = TypeVar("MessageT", bound=Message)

_SMALL = [bytes([number]) for number in range(0x80)]


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Return the message of type ``kind`` that ``data`` holds.

    Raises:
        CodecError: ``data`` holds none.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise CodecError(f"{len(data)} bytes are no {name}: {error}") from error


class FastCodecMiss(Exception):
    """A frame of an unusual form, which the generated code decodes; never leaves the codec."""


def varint(number: int) -> bytes:
    """Return ``number`` (at least 0) as a protobuf varint."""
    if number < 0x80:
        return _SMALL[number]
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
    return b"%b%b%b" % (tag, varint(len(data)), data) if data else b""


@lru_cache(maxsize=64)
def value_head(tag: bytes, size: int) -> bytes:
    """Return the tags and lengths before the ``size`` bytes of a ``SpaceValue`` in a field."""
    head = b"\x0a" + varint(size)  # SpaceValueBytes.data
    head = b"\x0a" + varint(len(head) + size) + head  # SpaceValue.bytes
    return tag + varint(len(head) + size) + head


def length_at(data: bytes, at: int) -> tuple[int, int]:
    """Return the varint at ``at``, below 2**28, and the position after it.

    Raises:
        FastCodecMiss: It has more than four bytes.
        IndexError: ``data`` ends within it.
    """
    number = data[at]
    if number < 0x80:
        return number, at + 1
    number &= 0x7F
    for shift in (7, 14, 21):
        at += 1
        part = data[at]
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at + 1
    raise FastCodecMiss


def value_at(data: bytes, at: int, tag: int) -> tuple[int, int]:
    """Return start and end of the bytes of the ``SpaceValue`` in the field ``tag`` at ``at``.

    Raises:
        FastCodecMiss: There is none, or it has anything besides its bytes.
        IndexError: ``data`` ends before the bytes.
    """
    is_known = data[at] == tag
    size, at = length_at(data, at + 1)
    outer = at + size
    is_known &= data[at] == 0x0A
    size, at = length_at(data, at + 1)
    inner = at + size
    is_known &= data[at] == 0x0A
    size, at = length_at(data, at + 1)
    if not (is_known and at + size == inner == outer):
        raise FastCodecMiss
    return at, inner


def last_text(data: bytes, at: int, tag: bytes) -> str:
    """Return the text in the field ``tag`` at ``at``, the last one of the frame; it may be missing.

    Raises:
        FastCodecMiss: There is another field, or more than one.
        UnicodeDecodeError: The text is no UTF-8.
        IndexError: ``data`` ends within the field.
    """
    if at == len(data):
        return ""
    size, start = length_at(data, at + len(tag))
    if not data.startswith(tag, at) or start + size != len(data):
        raise FastCodecMiss
    return data[start:].decode()
