"""Infos, options and metadata to ``rlmesh.spaces.v1.MetaMap`` and back.

Users put anything into infos, and a step must not fail for it: what the wire has no form for
becomes text. Only what a peer sends is judged.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import DTYPES, MAX_RANK
from rlmesh_ray.wire._pb.rlmesh.spaces.v1 import meta_pb2 as pb
from rlmesh_ray.wire.rlmesh_v1.frames import as_utf8

ARRAY_KEY = "rlmesh_ray.ndarray"
"""The only key of a map that stands for an array."""

# protobuf parsers stop at 100 nested messages; a level here takes three.
_MAX_DEPTH = 24
_OBJECT = "object"
_ARRAY_DTYPES = {
    name: np.dtype(name).newbyteorder("<") for name in (*DTYPES, "complex64", "complex128")
}
_INT64 = range(-(2**63), 2**63)


def encode_meta(infos: Mapping[Any, Any], *, tag_arrays: bool) -> pb.MetaMap:
    """Return ``infos`` as a message. Never fails for an odd value.

    Args:
        infos: Scalars, text, bytes, None, arrays, and nested mappings and sequences of these.
            Anything else (integers beyond int64, sets, objects, what is nested too deep)
            becomes text, and so does a key that is none.
        tag_arrays: Whether arrays keep dtype and shape, for a peer that knows the form; else
            they become nested lists.
    """
    message = pb.MetaMap()
    _fill_map(message, infos, tag_arrays, 0)
    return message


def decode_meta(message: pb.MetaMap) -> dict[str, Any]:
    """Return what ``message`` holds; sequences are lists, tagged arrays are arrays again.

    Keys are in alphabetical order.

    Raises:
        CodecError: A tagged array makes no sense.
    """
    # A protobuf map has no order of its own, not even the same one in every process.
    return {key: _decode(message.entries[key]) for key in sorted(message.entries)}


def _fill_map(message: pb.MetaMap, infos: Mapping[Any, Any], tag_arrays: bool, depth: int) -> None:
    for key, value in infos.items():
        name = as_utf8(key) if isinstance(key, str) else _as_text(key)
        _fill(message.entries[name], value, tag_arrays, depth)


def _fill(message: pb.MetaValue, value: Any, tag_arrays: bool, depth: int) -> None:
    if value is None:
        return
    scalar = _scalar(value)
    if scalar is not None:
        kind, number = scalar
        setattr(message, kind, number)
    elif depth >= _MAX_DEPTH:
        message.str = _as_text(value)
    elif isinstance(value, Mapping) and not _looks_tagged(value):
        message.map.SetInParent()
        _fill_map(message.map, value, tag_arrays, depth + 1)
    elif isinstance(value, (list, tuple)):
        message.list.SetInParent()
        for item in value:
            _fill(message.list.items.add(), item, tag_arrays, depth + 1)
    elif isinstance(value, np.ndarray):
        _fill_array(message, value, tag_arrays, depth)
    else:
        message.str = _as_text(value)


def _looks_tagged(value: Mapping[Any, Any]) -> bool:
    # A user's own map in the form of an array would decode as one, or not at all.
    return len(value) == 1 and ARRAY_KEY in value


def _fill_array(message: pb.MetaValue, array: NDArray[Any], tag_arrays: bool, depth: int) -> None:
    if not tag_arrays or array.ndim > MAX_RANK:
        _fill(message, array.tolist(), tag_arrays, depth)
        return
    dtype = _ARRAY_DTYPES.get(array.dtype.name)
    entries = message.map.entries[ARRAY_KEY].map.entries
    entries["dtype"].str = _OBJECT if dtype is None else array.dtype.name
    _fill(entries["shape"], array.shape, tag_arrays, 0)
    if dtype is None:
        entries["data"].list.SetInParent()
        for item in array.ravel().tolist():
            _fill(entries["data"].list.items.add(), item, tag_arrays, depth + 3)
    else:
        entries["data"].bytes = np.asarray(array, dtype).tobytes()


def _scalar(value: Any) -> tuple[str, Any] | None:
    """Return the field and the plain value of a scalar; None when ``value`` is none."""
    if isinstance(value, (bool, np.bool_)):
        return "bool", bool(value)
    if isinstance(value, (int, np.integer)):
        number = int(value)
        return ("int", number) if number in _INT64 else ("str", _as_text(number))
    if isinstance(value, (float, np.floating)):
        return "float", float(value)
    if isinstance(value, str):
        return "str", as_utf8(str.__str__(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "bytes", bytes(value)
    return None


def _as_text(value: Any) -> str:
    try:
        return as_utf8(str(value))
    except Exception:  # noqa: BLE001  # a user's __str__ may do anything; the step goes on
        return f"<{type(value).__name__}>"


def _decode(message: pb.MetaValue) -> Any:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "list":
        return [_decode(item) for item in message.list.items]
    if kind == "map":
        entries = message.map.entries
        if len(entries) == 1 and ARRAY_KEY in entries:
            return _array(_decode(entries[ARRAY_KEY]))
        return decode_meta(message.map)
    return getattr(message, kind)


def _array(plain: Any) -> NDArray[Any]:
    if not isinstance(plain, dict) or plain.keys() != {"dtype", "shape", "data"}:
        raise CodecError(f"{ARRAY_KEY}: expected dtype, shape and data")
    name, shape, data = plain["dtype"], _shape(plain["shape"]), plain["data"]
    if name == _OBJECT and isinstance(data, list):
        return _object_array(shape, data)
    if not isinstance(name, str) or name not in _ARRAY_DTYPES or not isinstance(data, bytes):
        raise CodecError(f"{ARRAY_KEY}: dtype {name!r} with {type(data).__name__} as data")
    dtype = _ARRAY_DTYPES[name]
    if len(data) != dtype.itemsize * math.prod(shape):
        raise CodecError(f"{ARRAY_KEY}: {len(data)} bytes for shape {shape} of {name}")
    if dtype.kind == "b":
        return np.not_equal(np.frombuffer(data, np.uint8), 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape).astype(name)  # own, writable memory


def _object_array(shape: tuple[int, ...], items: list[Any]) -> NDArray[Any]:
    if len(items) != math.prod(shape):
        raise CodecError(f"{ARRAY_KEY}: {len(items)} objects for shape {shape}")
    flat = np.empty(len(items), object)
    for index, item in enumerate(items):
        flat[index] = item
    return flat.reshape(shape)


def _shape(plain: Any) -> tuple[int, ...]:
    is_list = isinstance(plain, list) and all(type(length) is int for length in plain)
    if not is_list or len(plain) > MAX_RANK or min(plain, default=0) < 0:
        raise CodecError(f"{ARRAY_KEY}: no shape")
    if math.prod(max(length, 1) for length in plain) > 2**40:
        raise CodecError(f"{ARRAY_KEY}: shape {plain} is not possible")
    return tuple(plain)
