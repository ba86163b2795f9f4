"""Specs of tensors, the tensors of a space, and the contract as a property.

A space has one tensor a leaf, named by the leaf's path. The root of a space that is no Dict or
Tuple is ``action`` or ``observation``; the others have their path, with a '.' between its parts.
What is no part of the path is percent-encoded: '.' and '%' in keys, and the first letter of a key
that would take one of this module's own names.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf import json_format
from google.protobuf.unknown_fields import UnknownFieldSet

from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    Array,
    DataType,
    data_type_of,
    encode_payload,
    flat_payload,
    pb,
    shaped,
)
from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import Leaf, Path
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, MultiBinarySpec, MultiDiscreteSpec
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2
from rlmesh_ray.wire.rlmesh_v1.contract import contract_from_proto, contract_to_proto

_UNBOUNDED = {DataType.INVALID, DataType.BOOL, DataType.STRING, DataType.PROTO}
# Fields of a bound before 1.1, which was one number; they are reserved now.
_OLD_BOUNDS = {
    1: DataType.FLOAT,
    2: DataType.DOUBLE,
    3: DataType.INT32,
    4: DataType.INT64,
    5: DataType.UINT32,
    6: DataType.UINT64,
    7: DataType.INT8,
    8: DataType.UINT8,
}


@dataclass(frozen=True, slots=True, eq=False)
class TensorSpec:
    """Name, data type, shape and bounds of a tensor."""

    name: str
    dtype: DataType
    shape: tuple[int, ...] = ()
    """At most one negative axis: of variable length."""
    low: Array | None = None
    """Inclusive bound at ``dtype.numpy``: without axes for all elements, or of ``shape``."""
    high: Array | None = None
    """Likewise."""


@dataclass(frozen=True, slots=True)
class AgentSpecs:
    """Specs of an agent's actions and observations, by uid."""

    actions: Mapping[int, TensorSpec]
    observations: Mapping[int, TensorSpec]


def spec_to_proto(spec: TensorSpec) -> Any:
    message = pb.TensorSpec(name=spec.name, shape=spec.shape, dtype=int(spec.dtype))
    for bound, target in ((spec.low, message.min), (spec.high, message.max)):
        if bound is not None:
            flat = np.asarray(bound, spec.dtype.numpy).ravel()
            getattr(target, spec.dtype.field).MergeFromString(encode_payload(flat, spec.dtype))
    return message


def spec_from_proto(message: Any) -> TensorSpec:
    """Return the spec in a ``pb.TensorSpec``, also of a server that is older than 1.1.

    Raises:
        CodecError: It contradicts itself, or its dtype is not known.
    """
    name = f"the spec of {message.name!r}"
    try:
        kind = DataType(message.dtype)
    except ValueError:
        raise CodecError(f"{name}: data type {message.dtype} is not known") from None
    shape = tuple(message.shape)
    if sum(axis < 0 for axis in shape) > 1:
        raise CodecError(f"{name}: shape {list(shape)} has more than one variable axis")
    low = _bound(message.min, kind, shape, f"{name}, min")
    high = _bound(message.max, kind, shape, f"{name}, max")
    if low is not None and high is not None and not (low <= high).all():
        raise CodecError(f"{name}: its minimum is above its maximum")
    return TensorSpec(message.name, kind, shape, low, high)


def specs_to_proto(specs: AgentSpecs) -> Any:
    return pb.ActionObservationSpecs(
        actions={uid: spec_to_proto(spec) for uid, spec in specs.actions.items()},
        observations={uid: spec_to_proto(spec) for uid, spec in specs.observations.items()},
    )


def specs_from_proto(message: Any) -> AgentSpecs:
    """Return the specs in a ``pb.ActionObservationSpecs``, by ascending uid.

    Raises:
        CodecError: A spec contradicts itself, or two have the same name.
    """
    return AgentSpecs(
        _by_uid(message.actions, "action"), _by_uid(message.observations, "observation")
    )


def _by_uid(messages: Any, domain: str) -> dict[int, TensorSpec]:
    specs = {uid: spec_from_proto(messages[uid]) for uid in sorted(messages)}
    names: set[str] = set()
    for spec in specs.values():
        if spec.name in names:
            raise CodecError(f"two {domain}s are named {spec.name!r}")
        names.add(spec.name)
    return specs


def _bound(value: Any, kind: DataType, shape: tuple[int, ...], name: str) -> Array | None:
    field = value.WhichOneof("payload")
    if field is None:
        return _old_bound(value, kind, name)
    if kind in _UNBOUNDED or field != kind.field:
        raise CodecError(f"{name}: {field} do not bound {kind.name}")
    flat = flat_payload(value, kind)
    if len(flat) == 1:
        return flat.reshape(())
    if any(axis < 0 for axis in shape):
        raise CodecError(f"{name}: a variable shape needs one bound for all elements")
    return shaped(flat, shape, name)


def _old_bound(value: Any, kind: DataType, name: str) -> Array | None:
    unknown: Any = UnknownFieldSet(value)  # its type stubs lack the iteration
    for field in unknown:
        if _OLD_BOUNDS.get(field.field_number) is kind:
            return _old_number(field.data, kind, name)
    return None


def _old_number(data: Any, kind: DataType, name: str) -> Array:
    """Return a bound from the data of an unknown field: bits, a varint, or bytes."""
    dtype = kind.numpy
    try:
        if isinstance(data, bytes):
            return np.frombuffer(data, dtype, 1).reshape(())
        if kind is DataType.FLOAT:
            return np.array(data, np.uint32).view(dtype)
        if kind is DataType.DOUBLE:
            return np.array(data, np.uint64).view(dtype)
        if dtype.kind == "i" and data >= 2**63:
            data -= 2**64
        return np.array(data, dtype)
    except (ValueError, OverflowError) as error:
        raise CodecError(f"{name}: {data!r} is no {kind.name}") from error


ACTION = "action"
OBSERVATION = "observation"
REWARD = "reward"
"""Observation: DOUBLE; 0 on the first step of a sequence."""
PRESENT = "present"
"""Observation of an agent among several: BOOL, whether it was observed."""
TERMINATED = "terminated"
"""Observation of a batched join: BOOL, one a lane."""
TRUNCATED = "truncated"
"""Likewise."""
_OWN_NAMES = {REWARD, PRESENT, TERMINATED, TRUNCATED, "discount"}
_WIDER = {"float16": np.float32, "int16": np.int32, "uint16": np.uint32}


def tensor_spec(leaf: Leaf, name: str, num_lanes: int | None = None) -> TensorSpec:
    """Return the spec of the tensor of one leaf.

    Args:
        leaf: Of a lane's space.
        name: Name of the tensor.
        num_lanes: Width of a batched value, whose tensor has one more axis; None: one lane.
    """
    kind = data_type(leaf)
    shape = leaf.shape if num_lanes is None else (num_lanes, *leaf.shape)
    bounds = [
        np.broadcast_to(bound, shape) if bound is not None and bound.ndim else bound
        for bound in _bounds(leaf, kind)
    ]
    return TensorSpec(name, kind, shape, *bounds)


def tensor_name(path: Path, root: str) -> str:
    if not path:
        return root
    first, *others = [_escaped(str(part)) for part in path]
    if first in _OWN_NAMES:
        first = f"%{ord(first[0]):02X}{first[1:]}"
    return ".".join((first, *others))


def data_type(leaf: Leaf) -> DataType:
    """Return the data type of a leaf: its own dtype, or the next wider one that tensors have."""
    if leaf.dtype is None:
        return DataType.STRING
    return data_type_of(np.zeros(0, _WIDER.get(leaf.dtype.name, leaf.dtype)))


def _escaped(part: str) -> str:
    # No key is escaped to a '%' alone.
    return part.replace("%", "%25").replace(".", "%2E") or "%"


def _bounds(leaf: Leaf, kind: DataType) -> tuple[Array | None, Array | None]:
    if kind in (DataType.BOOL, DataType.STRING) or 0 in leaf.shape:
        return None, None
    dtype = kind.numpy
    low: Array | None
    high: Array | None
    low, high = (_shortened(np.asarray(bound, dtype)) for bound in _leaf_bounds(leaf))
    if dtype.kind == "f":
        is_low = (low != -np.inf).any()
        is_high = (high != np.inf).any()
        return low if is_low else None, high if is_high else None
    # dm_env takes a scalar from 0 on for a choice, and fails to count the values of a whole dtype.
    if not leaf.shape and low == 0 and high == np.iinfo(dtype).max:
        high = None
    return low, high


def _leaf_bounds(leaf: Leaf) -> tuple[Any, Any]:
    match leaf.spec:
        case BoxSpec():
            return leaf.spec.bounds()
        case DiscreteSpec(n, start):
            return start, start + n - 1
        case MultiBinarySpec():
            return 0, 1
        case MultiDiscreteSpec(nvec, shape):
            highest = np.array(nvec, leaf.dtype).reshape(shape)
            return 0, highest - 1
    raise AssertionError("a text has no bounds")


def _shortened(bound: Array) -> Array:
    first = bound.reshape(-1)[:1]
    return first.reshape(()) if (bound == first).all() else np.ascontiguousarray(bound)


CONTRACT = "rlmesh.contract"
"""Key of the property: a STRING, protobuf's JSON form of an ``rlmesh.env.v1.EnvContract``."""


def contract_to_text(contract: EnvContract) -> str:
    return json_format.MessageToJson(contract_to_proto(contract), indent=None)


def contract_from_text(text: str) -> EnvContract:
    """Return the contract in the value of the property.

    Raises:
        CodecError: It is none.
    """
    try:
        message = json_format.Parse(text, contract_pb2.EnvContract(), ignore_unknown_fields=True)
    except (json_format.ParseError, RecursionError) as error:
        raise CodecError(f"{CONTRACT} holds no contract: {error}") from error
    return contract_from_proto(message)
