"""Action batches for checks: conforming ones for any space, and ones with a single violation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from rlmesh_ray.compliance.probe import ACTION_SPACE, METADATA_KEY, REST, ProbeCommand
from rlmesh_ray.spaces.batch import Column, Leaf, coerce, flatten, leaves
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.multi_agent import filler_of_leaf
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
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
    return [(index, leaf) for index, leaf in enumerate(leaves(spec)) if type(leaf.spec) is kind]


def with_column(columns: list[Column], index: int, column: Column) -> list[Column]:
    return [*columns[:index], column, *columns[index + 1 :]]


def with_nan(contract: EnvContract) -> list[bytes]:
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
    return [
        *_with_bytes(contract, kind, lambda data, leaf: data + bytes(leaf.dtype.itemsize)),
        *_with_bytes(contract, kind, lambda data, leaf: data[: -leaf.dtype.itemsize]),
    ]


def widened(contract: EnvContract) -> list[bytes]:
    """Return an action in which a Box is sent at twice the width of its dtype."""
    return _with_bytes(contract, BoxSpec, lambda data, _leaf: data + data)


def without_key(contract: EnvContract) -> list[bytes]:
    def drop(node: pb.SpaceValueNode) -> None:
        del node.dict.entries[min(node.dict.entries)]

    return _with_container(contract, DictSpec, drop)


def of_another_arity(contract: EnvContract) -> list[bytes]:
    def drop(node: pb.SpaceValueNode) -> None:
        del node.tuple.items[-1]

    def repeat(node: pb.SpaceValueNode) -> None:
        node.tuple.items.append(node.tuple.items[-1])

    return [
        *_with_container(contract, TupleSpec, drop),
        *_with_container(contract, TupleSpec, repeat),
    ]


def packed_rest(contract: EnvContract, num_lanes: int | None = None) -> bytes:
    width = contract.num_envs if num_lanes is None else num_lanes
    return values.encode_batch(
        contract.action_space, conforming(contract.action_space, width), width
    )


def _packed(contract: EnvContract, columns: list[Column]) -> bytes:
    return values.encode_batch(contract.action_space, columns, contract.num_envs)


def _with_firsts(
    contract: EnvContract, index: int, leaf: Leaf, outside: list[int], element: int = 0
) -> list[bytes]:
    assert leaf.dtype is not None
    info = np.iinfo(leaf.dtype)
    return [
        _with_first(contract, index, value, element)
        for value in outside
        if info.min <= value <= info.max
    ]


def _with_first(contract: EnvContract, index: int, value: Any, element: int = 0) -> bytes:
    columns = conforming(contract.action_space, contract.num_envs)
    column = np.array(columns[index])
    column.reshape(-1)[element] = value
    return _packed(contract, with_column(columns, index, column))


def _with_bytes(
    contract: EnvContract, kind: type, change: Callable[[bytes, Any], bytes]
) -> list[bytes]:
    data = packed_rest(contract)
    found = leaves_of(contract.action_space, kind)
    if not found:
        return []
    leaf = found[0][1]
    if not leaf.path:  # the batch is the raw column
        return [change(data, leaf)]
    field = "tensor" if kind is BoxSpec else "multi"

    def edit(node: pb.SpaceValueNode) -> None:
        setattr(node, field, change(getattr(node, field), leaf))

    return [_edited(data, leaf.path, edit)]


def _with_container(contract: EnvContract, kind: type, edit: Edit) -> list[bytes]:
    for path in _containers(contract.action_space, kind, ()):
        return [_edited(packed_rest(contract), path, edit)]
    return []


def _containers(
    spec: SpaceSpec, kind: type, path: tuple[str | int, ...]
) -> Iterator[tuple[str | int, ...]]:
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
    batch = pb.ValueList.FromString(data)
    node = batch.items[0]
    for key in path:
        node = node.dict.entries[key] if isinstance(key, str) else node.tuple.items[key]
    edit(node)
    return batch.SerializeToString()


def _resting(leaf: Leaf, num_lanes: int) -> Column:
    filler = filler_of_leaf(leaf)
    if isinstance(filler, str):
        return (filler,) * num_lanes
    return np.array(np.broadcast_to(filler, (num_lanes, *leaf.shape)), order="C")
