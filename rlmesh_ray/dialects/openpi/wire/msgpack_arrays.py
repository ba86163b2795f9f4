"""Messages of openpi: msgpack with NumPy arrays and numbers as maps with marked keys.

What is read comes from the network: only dtypes of a list are accepted, and the number, length and
depth of lists and maps is limited, so that a message takes a small multiple of its own size.
"""

import contextlib
import importlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError, MissingPackageError
from rlmesh_ray.spaces.spec import DTYPES, MAX_RANK

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
    packer = _msgpack().Packer(default=_marked, use_bin_type=True)
    try:
        packed: bytes = packer.pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise CodecError(f"this has no form in openpi's protocol: {error}") from error
    return packed


def unpack(data: bytes) -> Any:
    """Return the value in a message; arrays are read-only views of it.

    Raises:
        CodecError: It is no message of the protocol, or exceeds a limit.
        MissingPackageError: The package msgpack is not installed.
    """
    reader = _Reader()
    # msgpack allocates what a list's header announces before it reads the items.
    most_items = min(MAX_ITEMS, len(data))
    try:
        value = _msgpack().unpackb(
            data,
            raw=False,
            strict_map_key=False,
            object_hook=reader.read_map,
            list_hook=reader.read_list,
            ext_hook=_refuse_extension,
            max_array_len=most_items,
            max_map_len=most_items,
        )
    except CodecError:
        raise
    # msgpack's own errors are not all derived from ValueError, nor from one base.
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise CodecError(f"this is not msgpack: {reason}") from error
    _check_depth(value, 0)
    return value


class _Reader:
    """Counts the values of one message, and reads arrays from the marked maps."""

    def __init__(self) -> None:
        self._num_values = 0

    def read_list(self, found: list[Any]) -> list[Any]:
        """Return a list as it is."""
        self._count(len(found))
        return found

    def read_map(self, found: dict[Any, Any]) -> Any:
        """Return what a map stands for: an array, a number, or itself with text as keys."""
        self._count(len(found))
        by_name: dict[str, Any] = {}
        for key, value in found.items():
            name = key.decode("utf-8") if isinstance(key, bytes) else key
            if not isinstance(name, str) or name in by_name:
                raise CodecError(f"the key {str(key)[:40]!r} of a map is no text, or comes twice")
            by_name[name] = value
        if _ARRAY in by_name:
            return _array(by_name)
        if _NUMBER in by_name:
            return _number(by_name)
        return by_name

    def _count(self, num_items: int) -> None:
        self._num_values += 1 + num_items
        if self._num_values > MAX_VALUES:
            raise CodecError(
                f"the message has more than {MAX_VALUES} values; send arrays instead of lists"
            )


def _array(found: Mapping[str, Any]) -> NDArray[Any]:
    dtype, data = _dtype(found.get("dtype")), found.get("data")
    if not isinstance(data, bytes):
        raise CodecError("the data of an array is no binary value")
    shape = _shape(found.get("shape"))
    # Python's integers do not overflow, where NumPy's would.
    if len(data) != dtype.itemsize * math.prod(shape):
        raise CodecError(f"an array of {dtype} and shape {shape} comes with {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise CodecError("an array of truth values has one that is neither 0 nor 1")
    return array


def _shape(axes: object) -> tuple[int, ...]:
    if (
        not isinstance(axes, list)
        or len(axes) > MAX_RANK + 1
        or not all(type(axis) is int and 0 <= axis < 2**31 for axis in axes)
    ):
        raise CodecError(f"an array has the shape {str(axes)[:40]}")
    return tuple(axes)


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


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise CodecError(
        f"an extension of msgpack, of type {code}, has no meaning in openpi's protocol"
    )


def _msgpack() -> Any:
    """Return msgpack's implementation, beneath the names that ``msgpack_numpy.patch`` replaces.

    That function lets ``msgpack.unpackb`` run pickle on what is read, for the whole process.
    """
    for name in ("msgpack._cmsgpack", "msgpack.fallback"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise MissingPackageError("openpi's protocol needs: pip install 'rlmesh-ray[openpi]'")
