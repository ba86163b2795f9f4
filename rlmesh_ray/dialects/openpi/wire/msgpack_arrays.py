"""Messages of openpi: msgpack with NumPy arrays and numbers as maps with marked keys.

What is read comes from the network: only dtypes of a list are accepted, and the number, length and
depth of lists and maps is limited, so that a message takes a small multiple of its own size.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh_ray.errors import CodecError
from rlmesh_ray.spaces.spec import DTYPES
from rlmesh_ray.wire import msgpack_values

_DTYPES = {np.dtype(name).newbyteorder("<").str: np.dtype(name) for name in DTYPES}
"""The dtypes that are accepted, by NumPy's text, such as ``"<f4"``."""
_ARRAY, _NUMBER = "__ndarray__", "__npgeneric__"

MAX_ITEMS = 4096
"""Most items of a list or a map."""
MAX_VALUES = 2**16
"""Most values in a message, lists, maps and what they hold; an array's numbers do not count."""
MAX_DEPTH = 32
"""Deepest nesting of lists and maps."""


def pack(value: object) -> bytes:
    """Return the bytes of a value: maps, sequences, text, bytes, numbers and NumPy arrays.

    Raises:
        CodecError: A part of it has no form in the protocol.
        MissingPackageError: The package msgpack is not installed.
    """
    try:
        return msgpack_values.pack(value, _marked)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"this has no form in openpi's protocol: {error}") from error


def unpack(data: bytes) -> Any:
    """Return the value in a message; arrays are read-only views of it.

    Raises:
        CodecError: It is no message of the protocol, or exceeds a limit.
        MissingPackageError: The package msgpack is not installed.
    """
    value = msgpack_values.unpack(
        data, max_items=MAX_ITEMS, max_values=MAX_VALUES, read_map=_read_map
    )
    _check_depth(value, 0)
    return value


def _read_map(found: dict[Any, Any]) -> Any:
    """Return what a map stands for: an array, a number, or itself with text as keys."""
    by_name: dict[str, Any] = {}
    for key, value in found.items():
        name = key.decode("utf-8") if isinstance(key, bytes) else key
        if not isinstance(name, str) or name in by_name:
            raise CodecError(f"the key {str(key)[:40]!r} of a map is no text, or comes twice")
        by_name[name] = value
    if _ARRAY in by_name:
        dtype = _dtype(by_name.get("dtype"))
        return msgpack_values.array_of(dtype, by_name.get("shape"), by_name.get("data"))
    if _NUMBER in by_name:
        return _number(by_name)
    return by_name


def _number(found: Mapping[str, Any]) -> bool | int | float:
    _dtype(found.get("dtype"))
    number = found.get("data")
    if not isinstance(number, bool | int | float):
        raise CodecError("the data of a NumPy number is no number")
    return number


def _dtype(text: object) -> np.dtype[Any]:
    found = _DTYPES.get(text) if isinstance(text, str) else None
    if found is None:
        raise CodecError(
            f"an array has the dtype {str(text)[:40]!r}; accepted are {', '.join(_DTYPES)}"
        )
    return found


def _marked(value: object) -> object:
    """Return the marked map for an array or a NumPy number: ``default`` of msgpack's packer."""
    if isinstance(value, np.ndarray | np.generic) and value.dtype.name in DTYPES:
        if isinstance(value, np.ndarray):
            little = value.astype(value.dtype.newbyteorder("<"), copy=False)
            return {
                b"__ndarray__": True,
                b"data": little.tobytes(),
                b"dtype": little.dtype.str,
                b"shape": little.shape,
            }
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} {getattr(value, 'dtype', '')}".rstrip())


def _check_depth(value: object, depth: int) -> None:
    if not isinstance(value, dict | list):
        return
    if depth >= MAX_DEPTH:
        raise CodecError(f"the message is nested more than {MAX_DEPTH} deep")
    for part in value.values() if isinstance(value, dict) else value:
        _check_depth(part, depth + 1)
