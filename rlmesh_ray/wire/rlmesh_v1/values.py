"""Columns to the bytes of a ``SpaceValue`` and back; always a batch, also of one lane.

A space whose root is an array goes as the raw column: one copy out, none in. Anything else
goes as a ``ValueList`` with one node a lane.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.columns import concatenate, split
from rlmesh_ray.spaces.leaves import Column, Leaf, leaves
from rlmesh_ray.spaces.spec import (
    DTYPES,
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import value_pb2 as pb
from rlmesh_ray.wire.columns import check_column, check_size
from rlmesh_ray.wire.rlmesh_v1.frames import parse

_LITTLE = {np.dtype(name): np.dtype(name).newbyteorder("<") for name in DTYPES}
_KINDS: dict[type[LeafSpec], str] = {
    BoxSpec: "tensor",
    DiscreteSpec: "discrete",
    MultiBinarySpec: "multi",
    MultiDiscreteSpec: "multi",
    TextSpec: "text",
}
"""Which field of a node holds a leaf."""


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
    for leaf, column in zip(own, columns, strict=True):
        check_column(leaf, column, num_lanes)
    if _has_array_root(spec):
        return _raw(own[0], columns[0])
    return _encode_lanes(spec, columns, num_lanes)


def decode_batch(spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
    """Return the columns of a batch; arrays may be read-only views of ``data``.

    Values are not compared with their space here; see ``conformance.check``.

    Args:
        spec: Of one lane.
        data: From the peer.
        num_lanes: Width that the batch must have.

    Raises:
        CodecError: ``data`` is no batch of ``num_lanes`` such values.
    """
    own = leaves(spec)
    if _has_array_root(spec):
        return [_view(own[0], data, num_lanes)]
    batch = parse(pb.ValueList, data)
    if len(batch.items) != num_lanes:
        raise CodecError(f"the batch has {len(batch.items)} lanes, expected {num_lanes}")
    parts: list[list[Any]] = [[] for _ in own]
    for node in batch.items:
        _collect(spec, node, zip(own, parts, strict=True))
    return [_column(leaf, lanes) for leaf, lanes in zip(own, parts, strict=True)]


def join_batches(spec: SpaceSpec, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
    """Return the columns of several batches, one after the other, as ``decode_batch`` does.

    Args:
        spec: Of one lane.
        batches: From the peers; at least one.
        counts: Width that each must have.

    Raises:
        CodecError: One of them is no batch of that many such values.
    """
    if not _has_array_root(spec) or len(batches) == 1:
        return concatenate(
            [decode_batch(spec, data, count) for data, count in zip(batches, counts, strict=True)]
        )
    leaf = leaves(spec)[0]
    size = leaf.lane_bytes
    if [len(data) for data in batches] != [count * size for count in counts]:
        for data, count in zip(batches, counts, strict=True):
            check_size(leaf, len(data), count)
    # Not bytes, which are read-only: torch would have to copy them once more.
    return [_view(leaf, bytearray().join(batches), sum(counts))]


def split_batch(spec: SpaceSpec, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
    """Return the bytes of several batches whose columns follow each other, as ``encode_batch``.

    Raises:
        CodecError: A column is not what its leaf declares; coerce it first.
    """
    if not _has_array_root(spec):
        parts = split(columns, counts)
        return [encode_batch(spec, part, n) for part, n in zip(parts, counts, strict=True)]
    data = encode_batch(spec, columns, sum(counts))
    size = leaves(spec)[0].lane_bytes
    ends = [end * size for end in accumulate(counts)]
    return [data[end - n * size : end] for end, n in zip(ends, counts, strict=True)]


def _has_array_root(spec: SpaceSpec) -> bool:
    return not isinstance(spec, (DictSpec, TupleSpec, TextSpec))


def _raw(leaf: Leaf, column: Column) -> bytes:
    return np.asarray(column, _little(leaf)).tobytes()


def _little(leaf: Leaf) -> np.dtype[Any]:
    assert leaf.dtype is not None
    return _LITTLE[leaf.dtype]


def _encode_lanes(spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
    by_leaf = [_per_lane(leaf, column) for leaf, column in zip(leaves(spec), columns, strict=True)]
    batch = pb.ValueList()
    try:
        for lane in range(num_lanes):
            _fill(batch.items.add(), spec, (lanes[lane] for lanes in by_leaf))
        return batch.SerializeToString()
    except ValueError as error:  # a text without UTF-8 form, or more than 2 GiB
        raise CodecError(f"the batch has no wire form: {error}") from error


def _per_lane(leaf: Leaf, column: Column) -> Any:
    """Return what each lane's node will hold: texts, integers or bytes."""
    if isinstance(column, tuple):
        return column
    if isinstance(leaf.spec, DiscreteSpec):
        return column.tolist()
    data, size = _raw(leaf, column), leaf.lane_bytes
    return [data[lane * size : (lane + 1) * size] for lane in range(len(column))]


def _fill(node: pb.SpaceValueNode, spec: SpaceSpec, parts: Iterator[Any]) -> None:
    if isinstance(spec, DictSpec):
        node.dict.SetInParent()
        for key, part in spec.items:
            _fill(node.dict.entries[key], part, parts)
    elif isinstance(spec, TupleSpec):
        node.tuple.SetInParent()
        for part in spec.items:
            _fill(node.tuple.items.add(), part, parts)
    else:
        setattr(node, _KINDS[type(spec)], next(parts))


def _view(leaf: Leaf, data: bytes | bytearray, num_lanes: int) -> NDArray[Any]:
    check_size(leaf, len(data), num_lanes)
    shape = (num_lanes, *leaf.shape)
    if leaf.dtype == np.bool_:
        # Any other byte than 0 and 1 would be a bool that NumPy does not expect.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, _little(leaf)).reshape(shape)


def _collect(
    spec: SpaceSpec, node: pb.SpaceValueNode, parts: Iterator[tuple[Leaf, list[Any]]]
) -> None:
    """Append what ``node`` holds to the lanes of each leaf."""
    if isinstance(spec, DictSpec):
        entries = _part(node, "dict").entries
        for key, part in spec.items:
            if key not in entries:
                raise CodecError(f"a Dict value has no key {key!r}")
            _collect(part, entries[key], parts)
    elif isinstance(spec, TupleSpec):
        nodes = _part(node, "tuple").items
        if len(nodes) != len(spec.items):
            raise CodecError(f"a Tuple value has {len(nodes)} parts, expected {len(spec.items)}")
        for part, child in zip(spec.items, nodes, strict=True):
            _collect(part, child, parts)
    else:
        leaf, lanes = next(parts)
        value = _part(node, _KINDS[type(spec)])
        if isinstance(value, bytes):
            _check_length(leaf, value)
        lanes.append(value)


def _part(node: pb.SpaceValueNode, kind: str) -> Any:
    found = node.WhichOneof("kind")
    if found != kind:
        raise CodecError(f"a value is {found or 'empty'} where the space has {kind}")
    return getattr(node, kind)


def _check_length(leaf: Leaf, value: bytes) -> None:
    if len(value) != leaf.lane_bytes:
        raise CodecError(f"{leaf.name}: {len(value)} bytes, expected {leaf.lane_bytes} a lane")


def _column(leaf: Leaf, lanes: list[Any]) -> Column:
    if leaf.dtype is None:
        return tuple(lanes)
    if not isinstance(leaf.spec, DiscreteSpec):
        return _view(leaf, b"".join(lanes), len(lanes))
    column = np.array(lanes, np.int64)
    narrow = column.astype(leaf.dtype)
    if (narrow != column).any():
        raise CodecError(f"{leaf.name}: an integer is beyond {leaf.dtype}")
    return narrow
