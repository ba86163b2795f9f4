"""Just enough of protobuf's encoding to write and read frames whose schema is not ours."""

from collections.abc import Iterator

from rlmesh_ray.errors import CodecError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WIDTHS = {_FIXED64: 8, _FIXED32: 4}


def field(number: int, value: bytes | str | int) -> bytes:
    """Return one field: a number as a varint, anything else with its length before it."""
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | _BYTES) + _varint(len(data)) + data


def fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the numbers and contents of a message's own fields, where contents have a length.

    Raises:
        CodecError: ``data`` is cut short or no message.
    """
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, kind = tag >> 3, tag & 7
        if kind == _VARINT:
            _, at = _read_varint(data, at)
        elif kind == _BYTES:
            size, at = _read_varint(data, at)
            yield number, data[at : at + size]
            at += size
        elif kind in _WIDTHS:
            at += _WIDTHS[kind]
        else:
            raise CodecError(f"wire type {kind} is none")
    if at > len(data):
        raise CodecError("the message is cut short")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise CodecError("the message is cut short")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
