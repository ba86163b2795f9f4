"""Tensors to arrays and back, as whole buffers.

Numbers are NumPy arrays. Strings are arrays of ``object`` that hold ``str`` (NumPy's own text
loses NULs at the end), messages arrays of ``object`` that hold ``google.protobuf.Any``. A tensor
without a shape is an array without axes.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.dm_env_rpc.wire.data_types import (
    BY_FIELD,
    BYTES_KINDS,
    NUMPY,
    RAW_KINDS,
    DataType,
    data_type_of,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.package_messages import pb
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.protobuf import varint

_LONGEST = 10  # bytes of a varint
_SHIFTS = np.arange(_LONGEST, dtype=np.uint64) * np.uint64(7)
_POSITIONS = np.arange(_LONGEST)
_ALL_BITS = 2**64 - 1
_SEVEN_BITS = np.uint64(0x7F)


def encode_varints(values: NDArray[Any]) -> bytes:
    """Return integers of any dtype, flat, as a packed repeated field holds them."""
    if not values.size:
        return b""
    if values.size == 1:
        return varint(int(values.flat[0]) & _ALL_BITS)
    wide = (
        values.astype(np.int64, copy=False).view(np.uint64)
        if values.dtype.kind == "i"
        else (values.astype(np.uint64, copy=False))
    )
    if np.maximum.reduce(wide) < 0x80:
        return wide.astype(np.uint8).tobytes()
    groups = wide[:, None] >> _SHIFTS
    # All but the first group count only if anything is left there.
    lengths = 1 + np.count_nonzero(groups[:, 1:], axis=1)
    more = lengths[:, None] - 1 > _POSITIONS
    octets = ((groups & _SEVEN_BITS).astype(np.uint8)) | (more.astype(np.uint8) << 7)
    return bytes(octets[lengths[:, None] > _POSITIONS].tobytes())


def decode_varints(data: bytes | memoryview, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the integers of a packed repeated field, as protobuf itself writes it.

    Args:
        data: What the field holds; ends with a whole integer.
        dtype: Of the field: int32, int64, uint32 or uint64.
    """
    octets = np.frombuffer(data, np.uint8)
    if not octets.size:
        return np.zeros(0, dtype)
    if np.maximum.reduce(octets) < 0x80:
        return octets.astype(dtype)
    ends = np.flatnonzero(octets < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    positions = np.arange(len(octets)) - np.repeat(starts, ends - starts + 1)
    groups = (octets & 0x7F).astype(np.uint64) << (7 * positions).astype(np.uint64)
    wide = np.bitwise_or.reduceat(groups, starts)
    # Negative integers of 32 bits are written with 64.
    return wide.view(np.int64).astype(dtype) if dtype.kind == "i" else wide.astype(dtype)


__all__ = [
    "Array",
    "DataType",
    "data_type_of",
    "encode_flat",
    "encode_payload",
    "encode_tensor",
    "fitted",
    "flat_payload",
    "kind_of",
    "pack_tensor",
    "resolved_shape",
    "shape_field",
    "shaped",
    "unpack_tensor",
]

Array = NDArray[Any]
MAX_AXES = 32
_FIRST_FIELD = b"\x0a"
_SHAPE_TAG = b"\x7a"  # Tensor.shape


# --- writing ---------------------------------------------------------------------------


def encode_tensor(value: Any, kind: DataType | None = None) -> bytes:
    """Return the serialized Tensor of an array, scalar, string or nested list of these.

    Args:
        value: At the dtype of ``kind``; nothing is cast.
        kind: Its data type; None: that of ``data_type_of``.

    Raises:
        CodecError: There is no such tensor.
    """
    own = data_type_of(value)
    array = np.asarray(value, object if own is DataType.STRING else None)
    kind = own if kind is None else kind
    if kind is not own and array.size:
        raise CodecError(f"{array.dtype} is no {kind.name}; convert it first")
    return encode_flat(array.ravel(), kind, array.shape)


def encode_flat(flat: Array, kind: DataType, shape: tuple[int, ...]) -> bytes:
    """Return the serialized Tensor of ``flat``, which has the dtype of ``kind``.

    Args:
        flat: One axis; a single element stands for a whole tensor of equal ones.
        kind: Its data type.
        shape: The tensor's.
    """
    payload = encode_payload(flat, kind)
    if len(payload) > _LARGEST_CACHED:
        head, tail = _around(kind, len(payload), shape)
    else:
        head, tail = _cached_around(kind, len(payload), shape)
    return b"%b%b%b" % (head, payload, tail)


def pack_tensor(value: Any, kind: DataType | None = None) -> Any:
    """Return a ``pb.Tensor``; see ``encode_tensor``."""
    return pb.Tensor.FromString(encode_tensor(value, kind))


def encode_payload(flat: Array, kind: DataType) -> bytes:
    """Return the message in the payload field, such as a ``Tensor.FloatArray``."""
    if kind in RAW_KINDS:
        return _field(_raw(flat, kind))
    if kind is DataType.STRING:
        return b"".join([_text(text) for text in flat])
    if kind is DataType.PROTO:
        return b"".join([_field_even_empty(each.SerializeToString()) for each in flat])
    return _field(encode_varints(flat))


def _raw(flat: Array, kind: DataType) -> bytes:
    return flat.astype(NUMPY[kind], copy=False).tobytes()


def _text(text: str) -> bytes:
    try:
        return _field_even_empty(text.encode())
    except UnicodeEncodeError as error:
        raise CodecError(f"a string has no UTF-8 form: {error.reason}") from error


def _field(data: bytes) -> bytes:
    return _field_even_empty(data) if data else b""


def _field_even_empty(data: bytes) -> bytes:
    return b"%b%b%b" % (_FIRST_FIELD, varint(len(data)), data)


_LARGEST_CACHED = 2**24


def shape_field(shape: tuple[int, ...]) -> bytes:
    """Return the bytes of ``Tensor.shape``, which end a message; empty without axes."""
    axes = encode_varints(np.array(shape, np.int64))
    return _SHAPE_TAG + varint(len(axes)) + axes if axes else b""


def _around(kind: DataType, size: int, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    return bytes([kind << 3 | 2]) + varint(size), shape_field(shape)


_cached_around = lru_cache(maxsize=256)(_around)


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
    """Return ``flat`` in the resolved ``shape`` of its tensor; see ``resolved_shape``."""
    return fitted(flat, resolved_shape(shape, len(flat), name), name)


def fitted(flat: Array, shape: tuple[int, ...], name: str) -> Array:
    """Return ``flat`` in a resolved ``shape``: broadcast if it is one element."""
    try:
        return np.broadcast_to(flat.reshape(()), shape) if len(flat) == 1 else flat.reshape(shape)
    except ValueError as error:
        raise CodecError(f"{name}: no array can have shape {list(shape)}") from error


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
    known = [axis for axis in axes if axis >= 0]
    if len(axes) - len(known) > 1:
        raise CodecError(f"{name}: shape {list(axes)} has more than one variable axis")
    if len(known) < len(axes):
        inferred = _inferred(known, count, axes, name)
        return tuple(inferred if axis < 0 else axis for axis in axes)
    if count not in (1, math.prod(axes)):
        raise CodecError(f"{name}: {count} elements do not make shape {list(axes)}")
    return axes


def _inferred(known: list[int], count: int, axes: tuple[int, ...], name: str) -> int:
    if count == 1:
        return 1
    others = math.prod(known)
    if others == 0:
        if count == 0:
            return 0
    elif count % others == 0:
        return count // others
    raise CodecError(f"{name}: {count} elements do not make shape {list(axes)}")


def flat_payload(carrier: Any, kind: DataType) -> Array:
    """Return the elements of a ``pb.Tensor`` or ``pb.TensorSpec.Value`` that holds ``kind``."""
    payload = getattr(carrier, kind.field)
    if kind in BYTES_KINDS:
        return np.frombuffer(payload.array, NUMPY[kind])
    if kind in (DataType.STRING, DataType.PROTO):
        found = np.empty(len(payload.array), object)
        found[:] = list(payload.array)
        return found
    # Protobuf writes it as one packed field, in front, also if it came otherwise.
    data = payload.SerializeToString()
    if not data.startswith(_FIRST_FIELD):
        return np.zeros(0, NUMPY[kind])
    size, at = _length(data)
    numbers = memoryview(data)[at : at + size]
    if kind in RAW_KINDS:
        return np.frombuffer(numbers, NUMPY[kind])
    return decode_varints(numbers, NUMPY[kind])


def _length(data: bytes) -> tuple[int, int]:
    """Return the length after the first tag, and the offset of the bytes that it counts."""
    number, shift, at = 0, 0, 1
    while True:
        part = data[at]
        number |= (part & 0x7F) << shift
        at += 1
        if part < 0x80:
            return number, at
        shift += 7
