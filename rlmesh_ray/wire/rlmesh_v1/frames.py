"""Bytes to protobuf messages, with this package's error."""

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from rlmesh_ray.errors import CodecError

MessageT = TypeVar("MessageT", bound=Message)

_SMALL = [bytes([number]) for number in range(0x80)]


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """Return the message of type ``kind`` that ``data`` holds.

    Raises:
        CodecError: ``data`` holds no such message.
    """
    try:
        return kind.FromString(data)
    except DecodeError as error:
        name = kind.DESCRIPTOR.full_name
        raise CodecError(f"{len(data)} bytes are no {name}: {error}") from error


def varint(number: int) -> bytes:
    """Return ``number`` (at least 0) as protobuf writes lengths and integers."""
    if number < 0x80:
        return _SMALL[number]
    parts = bytearray()
    while number >= 0x80:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def as_utf8(text: str) -> str:
    """Return ``text`` with a question mark for what UTF-8 cannot express (lone surrogates)."""
    if text.isascii():
        return text
    return text.encode("utf-8", "replace").decode("utf-8")
