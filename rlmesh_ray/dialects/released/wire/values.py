"""Columns to the bytes of a ``SpaceValue`` and back; always a batch, also of one lane.

Each leaf is one field of bytes: an array's raw column, a text's slab. It is written and read by
hand, since there is nothing else in it; a test holds it against the generated code.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import Column, Leaf, SpaceSpec, leaves
from rlmesh_ray.wire.protobuf import varint, varint_at
from rlmesh_ray.wire.rlmesh_v1.values import (
    BatchCodec,
    array_bytes,
    array_column,
    check_column,
)

_LEAF = 0x0A  # SpaceValue.leaves
_WORD = 8


def encode_batch(spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
    return codec(spec).encode(columns, num_lanes)


def decode_batch(spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
    """Return the columns of a batch of a space, read-only; see ``BatchCodec.decode``."""
    return codec(spec).decode(data, num_lanes)


@lru_cache(maxsize=256)
def codec(spec: SpaceSpec) -> BatchCodec:
    """Return the codec of the batches of a space; it is cached.

    Args:
        spec: A lane's.
    """
    return _Codec(leaves(spec))


class _Codec(BatchCodec):
    """For any space, by its leaves."""

    def __init__(self, own: Sequence[Leaf]) -> None:
        self._leaves = own

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        if len(columns) != len(self._leaves):
            raise CodecError(f"{len(columns)} columns for {len(self._leaves)} leaves")
        parts = []
        for leaf, column in zip(self._leaves, columns, strict=True):
            check_column(leaf, column, num_lanes)
            data = _slab(column) if isinstance(column, tuple) else array_bytes(leaf, column)
            parts += [_head(len(data)), data]
        return b"".join(parts)

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        parts = zip(self._leaves, _parts(data, len(self._leaves)), strict=True)
        return [_column(leaf, part, num_lanes) for leaf, part in parts]

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        if len(self._leaves) != 1 or self._leaves[0].dtype is None:
            return super().split(columns, counts)
        leaf = self._leaves[0]
        check_column(leaf, columns[0], sum(counts))
        data, size = array_bytes(leaf, columns[0]), leaf.lane_bytes
        ends = [end * size for end in accumulate(counts)]
        return [
            _head(n * size) + data[end - n * size : end]
            for end, n in zip(ends, counts, strict=True)
        ]


def _head(size: int) -> bytes:
    return b"\x0a" + varint(size)


def _slab(texts: tuple[str, ...]) -> bytes:
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise CodecError(f"the batch has no wire form: {error}") from error
    words = struct.pack(f"<{1 + len(encoded)}Q", len(encoded), *map(len, encoded))
    return words + b"".join(encoded)


def _parts(data: bytes, count: int) -> list[memoryview]:
    view, at = memoryview(data), 0
    parts: list[memoryview] = []
    while at < len(data):
        if len(parts) == count:  # there may be millions more
            raise CodecError(f"the value has more leaves than the {count} expected")
        if data[at] != _LEAF:
            raise CodecError(f"{len(data)} bytes are no SpaceValue: a field that is no leaf")
        try:
            size, start = varint_at(data, at + 1)
        except IndexError:
            reason = f"{len(data)} bytes are no SpaceValue: a length makes no sense"
            raise CodecError(reason) from None
        at = start + size
        if at > len(data):
            raise CodecError(f"{len(data)} bytes are no SpaceValue: a leaf is cut short")
        parts.append(view[start:at])
    if len(parts) < count:
        raise CodecError(f"the value has {len(parts)} leaves, expected {count}")
    return parts


def _column(leaf: Leaf, data: memoryview, num_lanes: int) -> Column:
    if leaf.dtype is None:
        return _texts(leaf, data, num_lanes)
    return array_column(leaf, data, num_lanes)


def _texts(leaf: Leaf, data: memoryview, num_lanes: int) -> tuple[str, ...]:
    place = f" at {leaf.name}" if leaf.path else ""
    if len(data) < _WORD:
        raise CodecError(f"{len(data)} bytes of texts{place}: the count is missing")
    (count,) = struct.unpack_from("<Q", data)
    if count != num_lanes:
        raise CodecError(f"{count} texts{place}, expected {num_lanes}")
    at = _WORD * (1 + num_lanes)
    if len(data) < at:
        raise CodecError(f"{len(data)} bytes of texts{place}: lengths are missing")
    lengths = struct.unpack_from(f"<{num_lanes}Q", data, _WORD)
    if at + sum(lengths) != len(data):
        raise CodecError(f"{len(data)} bytes of texts{place}, their lengths tell {sum(lengths)}")
    texts = []
    for length in lengths:
        texts.append(_text(bytes(data[at : at + length]), place))
        at += length
    return tuple(texts)


def _text(data: bytes, place: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise CodecError(f"a text{place} is no UTF-8: {error}") from error
