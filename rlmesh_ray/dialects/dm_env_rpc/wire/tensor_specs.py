"""Specs of the tensors of actions, observations and properties."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.unknown_fields import UnknownFieldSet

from rlmesh_ray.dialects.dm_env_rpc.wire.package_messages import pb
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    Array,
    DataType,
    encode_payload,
    flat_payload,
    shaped,
)
from rlmesh_ray.errors import CodecError

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
    """Return the ``pb.TensorSpec``."""
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
    """Return the ``pb.ActionObservationSpecs``."""
    message = pb.ActionObservationSpecs()
    for own, target in (
        (specs.actions, message.actions),
        (specs.observations, message.observations),
    ):
        for uid, spec in own.items():
            target[uid].CopyFrom(spec_to_proto(spec))
    return message


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
            data = struct.unpack("<f", struct.pack("<I", data))[0]
        elif kind is DataType.DOUBLE:
            data = struct.unpack("<d", struct.pack("<Q", data))[0]
        elif dtype.kind == "i" and data >= 2**63:
            data -= 2**64
        return np.array(data, dtype)
    except (ValueError, OverflowError, struct.error) as error:
        raise CodecError(f"{name}: {data!r} is no {kind.name}") from error
