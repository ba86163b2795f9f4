"""Batches (columns, also of one lane) to bytes and back: ``BatchCodec``, and the edition's codecs.

A space whose root is an array is encoded as the raw column: one copy to encode, none to decode.
Other spaces are encoded as a ``ValueList`` with one node for each lane. The dialects and compressed
images have codecs of the same interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.batch import concatenate, split
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import (
    DTYPES,
    BoxSpec,
    Column,
    DictSpec,
    DiscreteSpec,
    Leaf,
    LeafSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
    leaves,
)
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import value_pb2 as pb
from rlmesh_ray.wire.protobuf import MOST_PARTS, parse

_LITTLE = {np.dtype(name): np.dtype(name).newbyteorder("<") for name in DTYPES}
_KINDS: dict[type[LeafSpec], str] = {
    BoxSpec: "tensor",
    DiscreteSpec: "discrete",
    MultiBinarySpec: "multi",
    MultiDiscreteSpec: "multi",
    TextSpec: "text",
}
"""Field of ``SpaceValueNode`` for each kind of leaf."""
_NODE_PARTS = 32
"""Most parts of a message for one leaf of one lane, with the nodes above it."""


class BatchCodec(ABC):
    """Encodes and decodes batches of one space; keep it where there are many batches."""

    @abstractmethod
    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        """Return the bytes of a batch, with a column for each leaf.

        Raises CodecError for one without exactly the dtype and ``(num_lanes, *shape)`` of its leaf;
        coerce it first.
        """

    @abstractmethod
    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        """Return the columns of a peer's batch; arrays may be read-only views of ``data``.

        Bounds and domains are not checked here; see ``spaces.validation.Checker``. Raises
        CodecError for what is not a batch of ``num_lanes`` values of the space.
        """

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        """Decode batches of the widths in ``counts`` into the columns of one, in order."""
        return join_each([self] * len(batches), batches, counts)

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        """Encode one batch as several, of the widths in ``counts``, in order."""
        return split_each([self] * len(counts), columns, counts)


def join_each(
    codecs: Sequence[BatchCodec], batches: Sequence[bytes], counts: Sequence[int]
) -> list[Column]:
    parts = zip(codecs, batches, counts, strict=True)
    return concatenate([codec.decode(data, count) for codec, data, count in parts])


def split_each(
    codecs: Sequence[BatchCodec], columns: Sequence[Column], counts: Sequence[int]
) -> list[bytes]:
    parts = zip(codecs, split(columns, counts), counts, strict=True)
    return [codec.encode(own, count) for codec, own, count in parts]


class ContractCodecs(NamedTuple):
    """The codecs of an environment's observations and actions, for its client or for a route."""

    observations: BatchCodec
    actions: BatchCodec

    @classmethod
    def made_by(cls, codec: Callable[[SpaceSpec], BatchCodec], contract: EnvContract) -> Self:
        return cls(codec(contract.observation_space), codec(contract.action_space))


def encode_batch(spec: SpaceSpec, columns: Sequence[Column], num_lanes: int) -> bytes:
    return codec(spec).encode(columns, num_lanes)


def decode_batch(spec: SpaceSpec, data: bytes, num_lanes: int) -> list[Column]:
    return codec(spec).decode(data, num_lanes)


@lru_cache(maxsize=256)
def codec(spec: SpaceSpec) -> BatchCodec:
    if isinstance(spec, (DictSpec, TupleSpec, TextSpec)):
        return NodeCodec(spec)
    return _ArrayCodec(leaves(spec)[0])


def check_column(leaf: Leaf, column: Column, num_lanes: int) -> None:
    """Require that ``column`` has the leaf's dtype and shape. Raises CodecError if not."""
    # The kind is compared first: NumPy takes None for float64 when it compares dtypes.
    if leaf.dtype is None or isinstance(column, tuple):
        if leaf.dtype is None and isinstance(column, tuple) and len(column) == num_lanes:
            return
    elif column.dtype == leaf.dtype and column.shape == (num_lanes, *leaf.shape):
        return
    found = (
        f"{len(column)} texts" if isinstance(column, tuple) else f"{column.dtype} {column.shape}"
    )
    expected = "texts" if leaf.dtype is None else f"{leaf.dtype} {leaf.shape}"
    raise CodecError(f"column {leaf.name!r} is {found}, expected {num_lanes} lanes of {expected}")


def array_column(leaf: Leaf, data: bytes | bytearray | memoryview, num_lanes: int) -> NDArray[Any]:
    """Return the column of an array leaf as a view of little-endian bytes; raises CodecError."""
    expected = num_lanes * leaf.lane_bytes
    if len(data) != expected:
        place = f" at {leaf.name}" if leaf.path else ""
        raise CodecError(
            f"{len(data)} bytes{place}, expected {expected} "
            f"({num_lanes} lanes of {leaf.dtype} {leaf.shape})"
        )
    assert leaf.dtype is not None, "texts are no array"
    shape = (num_lanes, *leaf.shape)
    if leaf.dtype == np.bool_:
        # A NumPy bool must be 0 or 1; a peer may send other bytes.
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, _LITTLE[leaf.dtype]).reshape(shape)


def array_bytes(leaf: Leaf, column: Column) -> bytes:
    assert leaf.dtype is not None, "texts are no array"
    return np.asarray(column, _LITTLE[leaf.dtype]).tobytes()


class _ArrayCodec(BatchCodec):
    """Codec of spaces whose root is an array."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        if len(columns) != 1:
            raise CodecError(f"{len(columns)} columns for 1 leaf")
        check_column(self._leaf, columns[0], num_lanes)
        return array_bytes(self._leaf, columns[0])

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        return [array_column(self._leaf, data, num_lanes)]

    def join(self, batches: Sequence[bytes], counts: Sequence[int]) -> list[Column]:
        if len(batches) == 1:
            return [array_column(self._leaf, batches[0], counts[0])]
        size = self._leaf.lane_bytes
        if [len(data) for data in batches] != [count * size for count in counts]:
            return super().join(batches, counts)  # names the one that is wrong
        # A bytearray, since bytes are read-only and torch would copy them once more.
        return [array_column(self._leaf, bytearray().join(batches), sum(counts))]

    def split(self, columns: Sequence[Column], counts: Sequence[int]) -> list[bytes]:
        data = self.encode(columns, sum(counts))
        if len(counts) == 1:
            return [data]
        size = self._leaf.lane_bytes
        ends = [end * size for end in accumulate(counts)]
        return [data[end - n * size : end] for end, n in zip(ends, counts, strict=True)]


class NodeCodec(BatchCodec):
    """Codec of all other spaces: a ``ValueList`` with one node for each lane."""

    def __init__(self, spec: SpaceSpec) -> None:
        self._spec = spec
        self._leaves = leaves(spec)

    def encode(self, columns: Sequence[Column], num_lanes: int) -> bytes:
        if len(columns) != len(self._leaves):
            raise CodecError(f"{len(columns)} columns for {len(self._leaves)} leaves")
        for leaf, column in zip(self._leaves, columns, strict=True):
            check_column(leaf, column, num_lanes)
        by_leaf = [self.node_values(*part) for part in zip(self._leaves, columns, strict=True)]
        batch = pb.ValueList()
        try:
            for lane in range(num_lanes):
                _fill(batch.items.add(), self._spec, (lanes[lane] for lanes in by_leaf))
            return batch.SerializeToString()
        except ValueError as error:  # a text without UTF-8 form, or more than 2 GiB
            raise CodecError(f"the batch has no wire form: {error}") from error

    def decode(self, data: bytes, num_lanes: int) -> list[Column]:
        most_parts = max(MOST_PARTS, _NODE_PARTS * num_lanes * len(self._leaves))
        batch = parse(pb.ValueList, data, most_parts=most_parts)
        if len(batch.items) != num_lanes:
            raise CodecError(f"the batch has {len(batch.items)} lanes, expected {num_lanes}")
        parts: list[list[Any]] = [[] for _ in self._leaves]
        for node in batch.items:
            _collect(self._spec, node, iter(parts))
        return [self.column(leaf, lanes) for leaf, lanes in zip(self._leaves, parts, strict=True)]

    def node_values(self, leaf: Leaf, column: Column) -> Sequence[Any]:
        """Return the value for each lane's node: texts, integers or bytes."""
        if isinstance(column, tuple):
            return column
        if isinstance(leaf.spec, DiscreteSpec):
            numbers: list[int] = column.tolist()
            return numbers
        data, size = array_bytes(leaf, column), leaf.lane_bytes
        return [data[lane * size : (lane + 1) * size] for lane in range(len(column))]

    def column(self, leaf: Leaf, lanes: list[Any]) -> Column:
        """Return a column from the values of its lanes' nodes, whose sizes are not checked yet."""
        if leaf.dtype is None:
            return tuple(lanes)
        if not isinstance(leaf.spec, DiscreteSpec):
            for value in lanes:
                if len(value) != leaf.lane_bytes:
                    raise CodecError(
                        f"{leaf.name}: {len(value)} bytes, expected {leaf.lane_bytes} a lane"
                    )
            return array_column(leaf, b"".join(lanes), len(lanes))
        column = np.array(lanes, np.int64)
        narrow = column.astype(leaf.dtype)
        if (narrow != column).any():
            raise CodecError(f"{leaf.name}: an integer is beyond {leaf.dtype}")
        return narrow


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


def _collect(spec: SpaceSpec, node: pb.SpaceValueNode, parts: Iterator[list[Any]]) -> None:
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
        next(parts).append(_part(node, _KINDS[type(spec)]))


def _part(node: pb.SpaceValueNode, kind: str) -> Any:
    found = node.WhichOneof("kind")
    if found != kind:
        raise CodecError(f"a value is {found or 'empty'} where the space has {kind}")
    return getattr(node, kind)
