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
    fillers = [(leaf, filler_of_leaf(leaf)) for leaf in leaves(spec)]
    return [
        (filler,) * num_lanes
        if isinstance(filler, str)
        else np.array(np.broadcast_to(filler, (num_lanes, *leaf.shape)), order="C")
        for leaf, filler in fillers
    ]


def packed(
    contract: EnvContract, columns: list[Column] | None = None, num_lanes: int | None = None
) -> bytes:
    """Return the bytes of a batch of actions; by default of conforming ones for all lanes."""
    width = contract.num_envs if num_lanes is None else num_lanes
    own = conforming(contract.action_space, width) if columns is None else columns
    return values.encode_batch(contract.action_space, own, width)


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


def leaves_of(contract: EnvContract, kind: type) -> list[tuple[int, Any]]:
    """Return the leaves of the action space whose spec is of ``kind``, each after its position."""
    found = enumerate(leaves(contract.action_space))
    return [(index, leaf) for index, leaf in found if type(leaf.spec) is kind]


def with_nan(contract: EnvContract) -> list[bytes]:
    for index, leaf in leaves_of(contract, BoxSpec):
        if leaf.dtype.kind == "f" and leaf.lane_bytes:
            return [_with_elements(contract, index, 0, np.nan, np.inf)]
    return []


def outside_discrete(contract: EnvContract) -> list[bytes]:
    for index, leaf in leaves_of(contract, DiscreteSpec):
        start = leaf.spec.start
        return _outside(contract, index, leaf, 0, start + leaf.spec.n, start - 1)
    return []


def outside_multi_discrete(contract: EnvContract) -> list[bytes]:
    """Return actions in which one element of a MultiDiscrete is outside its own domain.

    The smallest domain is chosen: the value above may well be legal in another element.
    """
    for index, leaf in leaves_of(contract, MultiDiscreteSpec):
        if leaf.spec.nvec:
            element = int(np.argmin(leaf.spec.nvec))
            return _outside(contract, index, leaf, element, leaf.spec.nvec[element], -1)
    return []


def out_of_range(contract: EnvContract) -> list[bytes]:
    """Return actions in which one element of a Box is clearly above or below its bound.

    Nothing else is wrong with them. Bounds near the end of their dtype leave no room.
    """
    found = []
    for index, leaf in leaves_of(contract, BoxSpec):
        if leaf.dtype.kind != "f":
            continue
        for bound, direction in zip(leaf.spec.bounds(), (-1.0, 1.0), strict=True):
            with np.errstate(over="ignore"):
                beyond = bound + direction * np.maximum(1, np.abs(bound))
            elements = np.flatnonzero(np.isfinite(bound) & np.isfinite(beyond))
            if elements.size:
                element = int(elements[0])
                found.append(_with_elements(contract, index, element, beyond.flat[element]))
    return found


def odd_texts(contract: EnvContract) -> list[bytes]:
    """Return actions in which the Text of one lane is too long, or too short."""
    for index, leaf in leaves_of(contract, TextSpec):
        spec = leaf.spec
        lengths = [spec.max_length + 1] if spec.max_length < _LONGEST_TEXT else []
        lengths += [spec.min_length - 1] if spec.min_length > 0 else []
        found = []
        for length in lengths:
            columns = conforming(contract.action_space, contract.num_envs)
            columns[index] = ((spec.charset[:1] or "a") * length, *columns[index][1:])
            found.append(packed(contract, columns))
        return found
    return []


def resized(contract: EnvContract, kind: type) -> list[bytes]:
    return [
        *_with_bytes(contract, kind, lambda data, leaf: data + bytes(leaf.dtype.itemsize)),
        *_with_bytes(contract, kind, lambda data, leaf: data[: -leaf.dtype.itemsize]),
    ]


def widened(contract: EnvContract) -> list[bytes]:
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


def _outside(
    contract: EnvContract, index: int, leaf: Leaf, element: int, *outside: int
) -> list[bytes]:
    info = np.iinfo(leaf.dtype)
    within_dtype = [value for value in outside if info.min <= value <= info.max]
    return [_with_elements(contract, index, element, value) for value in within_dtype]


def _with_elements(contract: EnvContract, index: int, first: int, *elements: Any) -> bytes:
    """Return a batch that conforms except for some elements of a column, from ``first`` on.

    Elements beyond the end of the column are left out.
    """
    columns = conforming(contract.action_space, contract.num_envs)
    column = np.array(columns[index])
    part = column.reshape(-1)[first : first + len(elements)]
    part[:] = elements[: part.size]
    columns[index] = column
    return packed(contract, columns)


def _with_bytes(
    contract: EnvContract, kind: type, change: Callable[[bytes, Any], bytes]
) -> list[bytes]:
    data = packed(contract)
    found = leaves_of(contract, kind)
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
        return [_edited(packed(contract), path, edit)]
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
