"""Tensors and their specs, of arrays and of spaces, and the messages of the published package.

The wire modules import ``dm-env-rpc`` here and nowhere else, since it has no types.

Numbers are NumPy arrays. Strings are arrays of ``object`` that hold ``str`` (NumPy's own text
loses NULs at the end), messages arrays of ``object`` that hold ``google.protobuf.Any``. A tensor
without a shape is an array without axes. Floats, bytes and booleans are copied as whole buffers:
the package's own functions loop over their elements, and so would a client of images. Its
``reshape_array`` allocates any shape for one element; here that is a view.

A space has one tensor a leaf, named by the leaf's path. The root of a space that is no Dict or
Tuple is ``action`` or ``observation``; the others have their path, with a '.' between its parts.
What is no part of the path is percent-encoded: '.' and '%' in keys, and the first letter of a key
that would take one of this module's own names.
"""

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2
from dm_env_rpc.v1.extensions import properties_pb2
from google.protobuf import json_format
from google.protobuf.unknown_fields import UnknownFieldSet
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DiscreteSpec,
    Leaf,
    MultiBinarySpec,
    MultiDiscreteSpec,
    Path,
)
from rlmesh_ray.wire._pb.rlmesh.env.v1 import contract_pb2
from rlmesh_ray.wire.protobuf import field, varint
from rlmesh_ray.wire.rlmesh_v1.specs import contract_from_proto, contract_to_proto

pb: Any = dm_env_rpc_pb2
"""Tensors, specs, requests and responses."""
properties: Any = properties_pb2
"""The properties extension."""
status: Any = status_pb2
"""The status in an error response."""
error_details: Any = error_details_pb2
"""The messages in its details."""


class DataType(enum.IntEnum):
    """Data type of a tensor; also the number of its payload field in Tensor."""

    INVALID = 0
    """Only in the spec of a property that has no value."""
    FLOAT = 1
    DOUBLE = 2
    INT8 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    UINT32 = 7
    UINT64 = 8
    BOOL = 9
    STRING = 10
    PROTO = 11

    @property
    def field(self) -> str:
        """Name of the payload field, such as ``"floats"``."""
        return f"{self.name.lower()}s"

    @property
    def numpy(self) -> np.dtype[Any]:
        """Little-endian dtype of the arrays; ``object`` where elements are not numbers."""
        return _NUMPY[self]


_NUMPY: dict[DataType, np.dtype[Any]] = {
    DataType.INVALID: np.dtype(object),
    DataType.FLOAT: np.dtype("<f4"),
    DataType.DOUBLE: np.dtype("<f8"),
    DataType.INT8: np.dtype("i1"),
    DataType.INT32: np.dtype("<i4"),
    DataType.INT64: np.dtype("<i8"),
    DataType.UINT8: np.dtype("u1"),
    DataType.UINT32: np.dtype("<u4"),
    DataType.UINT64: np.dtype("<u8"),
    DataType.BOOL: np.dtype("?"),
    DataType.STRING: np.dtype(object),
    DataType.PROTO: np.dtype(object),
}
_BY_NUMPY = {dtype: kind for kind, dtype in _NUMPY.items() if dtype.kind != "O"}
BY_FIELD = {kind.field: kind for kind in DataType}
"""By name of the payload field."""
RAW_KINDS = {
    DataType.FLOAT,
    DataType.DOUBLE,
    DataType.INT8,
    DataType.UINT8,
    DataType.BOOL,
}
"""Data types whose arrays have the same bytes in memory and in a message."""
BYTES_KINDS = {DataType.INT8, DataType.UINT8}
"""Data types whose payload is one field of bytes."""


def data_type_of(value: Any) -> DataType:
    """Return the data type of ``value``: an array of a dtype above, or what NumPy converts to one.

    Raises:
        CodecError: There is no such tensor (float16, int16, complex, ...).
    """
    array = np.asarray(value)
    if array.dtype.kind in "UT":
        return DataType.STRING
    if array.dtype == object:
        first = next(iter(array.flat), "")
        return DataType.STRING if isinstance(first, str) else DataType.PROTO
    kind = _BY_NUMPY.get(array.dtype.newbyteorder("<"))
    if kind is None:
        raise CodecError(f"no tensor holds {array.dtype}; convert it to a dtype that one does")
    return kind


Array = NDArray[Any]
MAX_SETTINGS_BYTES = 2**20
"""Limit of this package's servers for the settings of a request."""
MAX_AXES = 32
_FEW = 16
_FIRST_FIELD = b"\x0a"
_ELEMENTWISE: dict[DataType, Any] = {
    DataType.INT32: pb.Tensor.Int32Array,
    DataType.INT64: pb.Tensor.Int64Array,
    DataType.UINT32: pb.Tensor.Uint32Array,
    DataType.UINT64: pb.Tensor.Uint64Array,
    DataType.STRING: pb.Tensor.StringArray,
    DataType.PROTO: pb.Tensor.ProtoArray,
}
"""Messages in the payload fields of the other data types, whose elements vary in length."""
_INTEGERS = _ELEMENTWISE.keys() - {DataType.STRING, DataType.PROTO}


# --- writing ---------------------------------------------------------------------------


def encode_tensor(value: Any) -> bytes:
    """Return the serialized Tensor of an array, scalar, string or nested list of these.

    Raises:
        CodecError: There is no such tensor.
    """
    kind = data_type_of(value)
    array = np.asarray(value, object if kind is DataType.STRING else None)
    return encode_flat(array.ravel(), kind, array.shape)


def encode_flat(flat: Array, kind: DataType, shape: tuple[int, ...]) -> bytes:
    """Return the serialized Tensor of ``flat``, which has the dtype of ``kind``.

    Args:
        flat: One axis; a single element stands for a whole tensor of equal ones.
        kind: Its data type.
        shape: The tensor's.
    """
    payload = encode_payload(flat, kind)
    return b"%c%b%b%b" % (kind << 3 | 2, varint(len(payload)), payload, shape_field(shape))


def pack_tensor(value: Any) -> Any:
    return pb.Tensor.FromString(encode_tensor(value))


def encode_payload(flat: Array, kind: DataType) -> bytes:
    if kind in RAW_KINDS:
        return field(_FIRST_FIELD, flat.astype(_NUMPY[kind], copy=False).tobytes())
    if (
        flat.size > _FEW
        and flat.dtype.kind in "iu"
        and 0 <= np.minimum.reduce(flat) <= np.maximum.reduce(flat) < 0x80
    ):
        # A byte each, as for the choices of many lanes.
        return field(_FIRST_FIELD, flat.astype(np.uint8).tobytes())
    try:
        return bytes(_ELEMENTWISE[kind](array=flat.tolist()).SerializeToString())
    except UnicodeEncodeError as error:
        raise CodecError(f"a string has no UTF-8 form: {error.reason}") from error


@lru_cache(maxsize=256)
def shape_field(shape: tuple[int, ...]) -> bytes:
    """Return the bytes of ``Tensor.shape``, which end a message; empty without axes."""
    return bytes(pb.Tensor(shape=shape).SerializeToString())


# --- reading ---------------------------------------------------------------------------


def kind_of(tensor: Any, name: str = "tensor") -> DataType:
    """Return the data type of a ``pb.Tensor``.

    Raises:
        CodecError: It has no payload.
    """
    field = tensor.WhichOneof("payload")
    if field is None:
        raise CodecError(f"{name}: a tensor without a payload")
    return BY_FIELD[field]


def unpack_tensor(tensor: Any, name: str = "tensor") -> Array:
    """Return the array in a ``pb.Tensor``, broadcast, and with its inferred axis resolved.

    Args:
        tensor: The peer's.
        name: Its name in errors.

    Returns:
        An array at the dtype of ``kind_of(tensor).numpy``; perhaps read-only, and one that was
        broadcast takes no memory.

    Raises:
        CodecError: Its shape and its payload do not go together.
    """
    flat = flat_payload(tensor, kind_of(tensor, name))
    return shaped(flat, tensor.shape, name)


def shaped(flat: Array, shape: Sequence[int], name: str) -> Array:
    """Return ``flat`` in the resolved ``shape`` of its tensor: a view, broadcast from one element.

    Raises:
        CodecError: They do not go together, see ``resolved_shape``.
    """
    found = resolved_shape(shape, len(flat), name)
    try:
        return np.broadcast_to(flat.reshape(()), found) if len(flat) == 1 else flat.reshape(found)
    except ValueError as error:
        raise CodecError(f"{name}: no array can have shape {list(found)}") from error


def resolved_shape(shape: Sequence[int], count: int, name: str) -> tuple[int, ...]:
    """Return the resolved ``shape`` of a payload of ``count`` elements.

    One element stands for as many as the shape has; a negative axis is then 1 long. No shape
    means exactly one element.

    Raises:
        CodecError: There is more than one negative axis, or the numbers do not work out.
    """
    axes = tuple(shape)
    if not axes and count == 1:
        return axes
    if len(axes) > MAX_AXES:
        raise CodecError(f"{name}: {len(axes)} axes are more than {MAX_AXES}")
    if sum(axis < 0 for axis in axes) > 1:
        raise CodecError(f"{name}: shape {list(axes)} has more than one variable axis")
    others = math.prod(axis for axis in axes if axis >= 0)
    inferred = 1 if count == 1 else count // (others or 1)
    found = tuple(inferred if axis < 0 else axis for axis in axes)
    if count not in (1, math.prod(found)):
        raise CodecError(f"{name}: {count} elements do not make shape {list(axes)}")
    return found


def flat_payload(carrier: Any, kind: DataType) -> Array:
    payload = getattr(carrier, kind.field)
    dtype = _NUMPY[kind]
    if kind in BYTES_KINDS:
        return np.frombuffer(payload.array, dtype)
    count = len(payload.array)
    is_raw = kind in RAW_KINDS and count > 0
    if is_raw or (count > _FEW and kind in _INTEGERS):
        # Protobuf writes them as one packed field, in front, also if they came otherwise.
        data = payload.SerializeToString()
        size = count * dtype.itemsize if is_raw else count
        start = len(_FIRST_FIELD) + len(varint(size))
        if is_raw:
            return np.frombuffer(data, dtype, count, start)
        if len(data) == start + size:  # a byte each
            return np.frombuffer(data, np.uint8, count, start).astype(dtype)
    return np.fromiter(payload.array, dtype, count)


# --- specs -----------------------------------------------------------------------------

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
    payload = value.WhichOneof("payload")
    if payload is None:
        return _old_bound(value, kind, name)
    if kind in _UNBOUNDED or payload != kind.field:
        raise CodecError(f"{name}: {payload} do not bound {kind.name}")
    flat = flat_payload(value, kind)
    if len(flat) == 1:
        return flat.reshape(())
    if any(axis < 0 for axis in shape):
        raise CodecError(f"{name}: a variable shape needs one bound for all elements")
    return shaped(flat, shape, name)


def _old_bound(value: Any, kind: DataType, name: str) -> Array | None:
    unknown: Any = UnknownFieldSet(value)  # its type stubs lack the iteration
    for each in unknown:
        if _OLD_BOUNDS.get(each.field_number) is kind:
            return _old_number(each.data, kind, name)
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
