"""Tensors to arrays and back, and the messages of the published ``dm-env-rpc`` package.

The wire modules import that package here and nowhere else, since it has no types.

Numbers are NumPy arrays. Strings are arrays of ``object`` that hold ``str`` (NumPy's own text
loses NULs at the end), messages arrays of ``object`` that hold ``google.protobuf.Any``. A tensor
without a shape is an array without axes. Floats, bytes and booleans are copied as whole buffers:
the package's own functions loop over their elements, and so would a client of images. Its
``reshape_array`` allocates any shape for one element; here that is a view.
"""

import enum
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from dm_env_rpc.v1 import dm_env_rpc_pb2
from dm_env_rpc.v1.extensions import properties_pb2
from google.rpc import error_details_pb2, status_pb2
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.protobuf import field, varint

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
