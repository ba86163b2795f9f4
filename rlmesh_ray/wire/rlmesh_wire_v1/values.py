"""Columns to the bytes of a ``SpaceValue`` and back; always a batch, also of one lane.

Each leaf is one field of bytes: an array's raw column, a text's slab. It is written and read by
hand, since there is nothing else in it; a test holds it against the generated code.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.leaves import Column, Leaf, leaves
from rlmesh_ray.spaces.spec import DTYPES, SpaceSpec
from rlmesh_ray.wire.columns import check_column, check_size
from rlmesh_ray.wire.rlmesh_v1.frames import varint

_LITTLE = {np.dtype(name): np.dtype(name).newbyteorder("<") for name in DTYPES}
_LEAF = 0x0A  # SpaceValue.leaves
_WORD = 8


def encode_batch(spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
    """Return the bytes of a batch.

    Args:
        spec: Of one lane.
        columns: One a leaf, at exactly its dtype and ``(num_lanes, *leaf.shape)``.
        num_lanes: Width of the batch.

    Raises:
        CodecError: A column is not what its leaf declares; coerce it first.
    """
    own = leaves(spec)
    if len(columns) != len(own):
        raise CodecError(f"{len(columns)} columns for {len(own)} leaves")
    parts = []
    for leaf, column in zip(own, columns, strict=True):
        check_column(leaf, column, num_lanes)
        data = _slab(column) if isinstance(column, tuple) else _raw(leaf, column)
        parts += [_head(len(data)), data]
    return b"".join(parts)


def decode_batch(spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
    """Return the columns of a batch; arrays are read-only views of ``data``.

    Args:
        spec: Of one lane.
        data: From the peer.
        num_lanes: Width that the batch must have.

    Raises:
        CodecError: ``data`` is no batch of ``num_lanes`` such values.
    """
    own = leaves(spec)
    parts = _parts(data, len(own))
    return [_column(leaf, part, num_lanes) for leaf, part in zip(own, parts, strict=True)]


def join_batches(spec: SpaceSpec, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
    """Return the columns of several batches, one after the other, as ``decode_batch`` does.

    Args:
        spec: Of one lane.
        batches: From the peers; at least one.
        counts: Width that each must have.

    Raises:
        CodecError: One of them is no batch of that many such values.
    """
    return concatenate(
        [decode_batch(spec, data, count) for data, count in zip(batches, counts, strict=True)]
    )


def split_batch(spec: SpaceSpec, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
    """Return the bytes of several batches whose columns follow each other, as ``encode_batch``.

    Raises:
        CodecError: A column is not what its leaf declares; coerce it first.
    """
    own = leaves(spec)
    if len(own) != 1 or own[0].dtype is None:
        parts = split(columns, counts)
        return [encode_batch(spec, part, n) for part, n in zip(parts, counts, strict=True)]
    check_column(own[0], columns[0], sum(counts))
    data, size = _raw(own[0], columns[0]), own[0].lane_bytes  # type: ignore[arg-type]  # no text
    ends = [end * size for end in accumulate(counts)]
    return [
        _head(n * size) + data[end - n * size : end] for end, n in zip(ends, counts, strict=True)
    ]


def _head(size: int) -> bytes:
    return b"\x0a" + varint(size)


def _raw(leaf: Leaf, column: NDArray[Any]) -> bytes:
    assert leaf.dtype is not None
    return np.asarray(column, _LITTLE[leaf.dtype]).tobytes()


def _slab(texts: tuple[str, ...]) -> bytes:
    try:
        encoded = [text.encode() for text in texts]
    except UnicodeEncodeError as error:
        raise CodecError(f"the batch has no wire form: {error}") from error
    words = struct.pack(f"<{1 + len(encoded)}Q", len(encoded), *map(len, encoded))
    return words + b"".join(encoded)


def _parts(data: bytes, count: int) -> list[memoryview]:
    """Return the leaves of a value, which has ``count`` of them."""
    view, at = memoryview(data), 0
    parts: list[memoryview] = []
    while at < len(data):
        if len(parts) == count:  # there may be millions more
            raise CodecError(f"the value has more leaves than the {count} expected")
        if data[at] != _LEAF:
            raise CodecError(f"{len(data)} bytes are no SpaceValue: a field that is no leaf")
        size, start = _length(data, at + 1)
        at = start + size
        if at > len(data):
            raise CodecError(f"{len(data)} bytes are no SpaceValue: a leaf is cut short")
        parts.append(view[start:at])
    if len(parts) < count:
        raise CodecError(f"the value has {len(parts)} leaves, expected {count}")
    return parts


def _length(data: bytes, at: int) -> tuple[int, int]:
    """Return the integer at ``at`` and where it ends."""
    number = shift = 0
    for position in range(at, min(at + 5, len(data))):
        part = data[position]
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, position + 1
        shift += 7
    raise CodecError(f"{len(data)} bytes are no SpaceValue: a length makes no sense")


def _column(leaf: Leaf, data: memoryview, num_lanes: int) -> Column:
    if leaf.dtype is None:
        return _texts(leaf, data, num_lanes)
    check_size(leaf, len(data), num_lanes)
    shape = (num_lanes, *leaf.shape)
    if leaf.dtype == np.bool_:
        # Any other byte than 0 and 1 would be a bool that NumPy does not expect.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, _LITTLE[leaf.dtype]).reshape(shape)


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
