"""Action batches for checks: conforming ones for any space, and ones with a single violation."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from rlmesh_ray.compliance.probe import ACTION_SPACE, METADATA_KEY, REST, ProbeCommand
from rlmesh_ray.spaces.batch import Column, Leaf, coerce, flatten, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    SpaceSpec,
    TextSpec,
    TupleSpec,
)
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import value_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1 import values

_LONGEST_TEXT = 2**16

Edit = Callable[[pb.SpaceValueNode], None]


def is_probe(contract: EnvContract) -> bool:
    """Return whether the environment is the probe of ``compliance.probe``."""
    return contract.metadata.get(METADATA_KEY) == 1 and contract.action_space == ACTION_SPACE


def conforming(spec: SpaceSpec, num_lanes: int) -> list[Column]:
    """Return columns of a batch within ``spec``: zeros where they are allowed, else the lowest."""
    return [_resting(leaf, num_lanes) for leaf in leaves(spec)]


def commands(*by_lane: ProbeCommand, **parts: Any) -> list[Column]:
    """Return the columns of the probe's action, with one command for each lane.

    Args:
        by_lane: Command of each lane.
        parts: Values of other parts, the same in every lane, such as ``text="b"``.
    """
    lanes = [{"command": command, **REST, **parts} for command in by_lane]
    by_leaf = zip(*(flatten(ACTION_SPACE, value) for value in lanes), strict=True)
    return [
        coerce(leaf, list(column), len(by_lane))
        for leaf, column in zip(leaves(ACTION_SPACE), by_leaf, strict=True)
    ]


def leaves_of(spec: SpaceSpec, kind: type) -> list[tuple[int, Leaf]]:
    """Return the leaves of one kind, each with its position among the columns."""
    return [(index, leaf) for index, leaf in enumerate(leaves(spec)) if type(leaf.spec) is kind]


def with_column(columns: list[Column], index: int, column: Column) -> list[Column]:
    """Return a copy of ``columns`` with one of them replaced."""
    return [*columns[:index], column, *columns[index + 1 :]]


def with_nan(contract: EnvContract) -> list[bytes]:
    """Return an action in which one element is NaN and, if it has more, another out of bounds."""
    spec = contract.action_space
    for index, leaf in leaves_of(spec, BoxSpec):
        if leaf.dtype is not None and leaf.dtype.kind == "f" and leaf.lane_bytes:
            columns = conforming(spec, contract.num_envs)
            column = np.array(columns[index])
            column.reshape(-1)[:2] = np.inf
            column.reshape(-1)[0] = np.nan
            return [_packed(contract, with_column(columns, index, column))]
    return []


def outside_discrete(contract: EnvContract) -> list[bytes]:
    """Return actions in which a Discrete is one above and one below its domain."""
    for index, leaf in leaves_of(contract.action_space, DiscreteSpec):
        assert isinstance(leaf.spec, DiscreteSpec)
        start, n = leaf.spec.start, leaf.spec.n
        return _with_firsts(contract, index, leaf, [start + n, start - 1])
    return []


def outside_multi_discrete(contract: EnvContract) -> list[bytes]:
    """Return actions in which one element of a MultiDiscrete is outside its own domain.

    The smallest domain is chosen: the value above may well be legal in another element.
    """
    for index, leaf in leaves_of(contract.action_space, MultiDiscreteSpec):
        assert isinstance(leaf.spec, MultiDiscreteSpec)
        if leaf.spec.nvec:
            element = int(np.argmin(leaf.spec.nvec))
            outside = [leaf.spec.nvec[element], -1]
            return _with_firsts(contract, index, leaf, outside, element)
    return []


def out_of_range(contract: EnvContract) -> list[bytes]:
    """Return actions in which one element of a Box is clearly above or below its bound.

    Nothing else is wrong with them. Bounds near the end of their dtype leave no room.
    """
    found = []
    for index, leaf in leaves_of(contract.action_space, BoxSpec):
        assert isinstance(leaf.spec, BoxSpec)
        if leaf.dtype is None or leaf.dtype.kind != "f":
            continue
        for bound, direction in zip(leaf.spec.bounds(), (-1.0, 1.0), strict=True):
            with np.errstate(over="ignore"):
                beyond = bound + direction * np.maximum(1, np.abs(bound))
            elements = np.flatnonzero(np.isfinite(bound) & np.isfinite(beyond))
            if elements.size:
                element = int(elements[0])
                found.append(_with_first(contract, index, beyond.flat[element], element))
    return found


def odd_texts(contract: EnvContract) -> list[bytes]:
    """Return actions in which a Text of the first lane is too long, or too short."""
    for index, leaf in leaves_of(contract.action_space, TextSpec):
        spec = leaf.spec
        assert isinstance(spec, TextSpec)
        columns = conforming(contract.action_space, contract.num_envs)
        lengths = [spec.max_length + 1] if spec.max_length < _LONGEST_TEXT else []
        lengths += [spec.min_length - 1] if spec.min_length > 0 else []
        texts = [(spec.charset[:1] or "a") * length for length in lengths]
        return [
            _packed(contract, with_column(columns, index, (text, *columns[index][1:])))
            for text in texts
        ]
    return []


def resized(contract: EnvContract, kind: type) -> list[bytes]:
    """Return actions in which a leaf of ``kind`` has an element too many, or too few."""
    return [
        *_with_bytes(contract, kind, lambda data, leaf: data + bytes(leaf.dtype.itemsize)),
        *_with_bytes(contract, kind, lambda data, leaf: data[: -leaf.dtype.itemsize]),
    ]


def widened(contract: EnvContract) -> list[bytes]:
    """Return an action in which a Box is sent at twice the width of its dtype."""
    return _with_bytes(contract, BoxSpec, lambda data, _leaf: data + data)


def without_key(contract: EnvContract) -> list[bytes]:
    """Return an action in which the first lane's first Dict lacks a key."""

    def drop(node: pb.SpaceValueNode) -> None:
        del node.dict.entries[min(node.dict.entries)]

    return _with_container(contract, DictSpec, drop)


def of_another_arity(contract: EnvContract) -> list[bytes]:
    """Return actions in which the first lane's first Tuple has a part less, or one more."""

    def drop(node: pb.SpaceValueNode) -> None:
        del node.tuple.items[-1]

    def repeat(node: pb.SpaceValueNode) -> None:
        node.tuple.items.append(node.tuple.items[-1])

    return [
        *_with_container(contract, TupleSpec, drop),
        *_with_container(contract, TupleSpec, repeat),
    ]


def packed_rest(contract: EnvContract, num_lanes: int | None = None) -> bytes:
    """Return a conforming action, also of another width than the contract's."""
    width = contract.num_envs if num_lanes is None else num_lanes
    return values.encode_batch(
        contract.action_space, conforming(contract.action_space, width), width
    )


def _packed(contract: EnvContract, columns: list[Column]) -> bytes:
    return values.encode_batch(contract.action_space, columns, contract.num_envs)


def _with_firsts(
    contract: EnvContract, index: int, leaf: Leaf, outside: list[int], element: int = 0
) -> list[bytes]:
    """Return one action for each of ``outside`` that the leaf's dtype can hold."""
    assert leaf.dtype is not None
    info = np.iinfo(leaf.dtype)
    return [
        _with_first(contract, index, value, element)
        for value in outside
        if info.min <= value <= info.max
    ]


def _with_first(contract: EnvContract, index: int, value: Any, element: int = 0) -> bytes:
    """Return a conforming action but for one element of the first lane."""
    columns = conforming(contract.action_space, contract.num_envs)
    column = np.array(columns[index])
    column.reshape(-1)[element] = value
    return _packed(contract, with_column(columns, index, column))


def _with_bytes(
    contract: EnvContract, kind: type, change: Callable[[bytes, Any], bytes]
) -> list[bytes]:
    """Return a conforming action but for the bytes of the first leaf of ``kind``, if any."""
    data = packed_rest(contract)
    for _, leaf in leaves_of(contract.action_space, kind):
        if not leaf.path:  # the batch is the raw column
            return [change(data, leaf)]
        field = "tensor" if kind is BoxSpec else "multi"
        edit: Edit = partial(_change_bytes, field, leaf, change)
        return [_edited(data, leaf.path, edit)]
    return []


def _change_bytes(
    field: str, leaf: Leaf, change: Callable[[bytes, Any], bytes], node: pb.SpaceValueNode
) -> None:
    setattr(node, field, change(getattr(node, field), leaf))


def _with_container(contract: EnvContract, kind: type, edit: Edit) -> list[bytes]:
    for path in _containers(contract.action_space, kind, ()):
        return [_edited(packed_rest(contract), path, edit)]
    return []


def _containers(
    spec: SpaceSpec, kind: type, path: tuple[str | int, ...]
) -> Iterator[tuple[str | int, ...]]:
    """Yield the paths of all Dicts or Tuples that have parts."""
    parts: Mapping[str | int, SpaceSpec] = {}
    if isinstance(spec, DictSpec):
        parts = dict(spec.items)
    elif isinstance(spec, TupleSpec):
        parts = dict(enumerate(spec.items))
    if parts and isinstance(spec, kind):
        yield path
    for key, part in parts.items():
        yield from _containers(part, kind, (*path, key))


def _edited(data: bytes, path: tuple[str | int, ...], edit: Edit) -> bytes:
    """Return a batch of nodes with the node at ``path`` of the first lane changed."""
    batch = pb.ValueList.FromString(data)
    node = batch.items[0]
    for key in path:
        node = node.dict.entries[key] if isinstance(key, str) else node.tuple.items[key]
    edit(node)
    return batch.SerializeToString()


def _resting(leaf: Leaf, num_lanes: int) -> Column:
    spec = leaf.spec
    if isinstance(spec, TextSpec):
        return ((spec.charset[:1] or "a") * spec.min_length,) * num_lanes
    assert leaf.dtype is not None
    shape = (num_lanes, *leaf.shape)
    if isinstance(spec, BoxSpec):
        low, high = spec.bounds()
        rest = np.clip(np.zeros((), leaf.dtype), low, high)
        return np.array(np.broadcast_to(rest, shape), order="C")
    start = spec.start if isinstance(spec, DiscreteSpec) else 0
    assert isinstance(spec, DiscreteSpec | MultiBinarySpec | MultiDiscreteSpec)
    return np.full(shape, start, leaf.dtype)
