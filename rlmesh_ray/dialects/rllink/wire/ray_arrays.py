"""NumPy arrays in Ray's messages, in the form of the package msgpack-numpy.

Its own decoder runs pickle on arrays of objects. This one reads arrays of plain numbers and
refuses everything else, structured ones included.
"""

import re
from typing import Any

import numpy as np

from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.msgpack_values import array_of

_DTYPE = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248])")


def encode(value: Any) -> Any:
    """Return a map that stands for an array or a NumPy number: ``default`` of msgpack's packer.

    Raises:
        TypeError: ``value`` is something else, or an array of something else.
    """
    if isinstance(value, np.ndarray) and m.is_plain(value):
        return {
            b"nd": True,
            b"type": value.dtype.str,
            b"kind": b"",
            b"shape": value.shape,
            b"data": value.tobytes(),
        }
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return {b"nd": False, b"type": value.dtype.str, b"data": value.tobytes()}
    raise TypeError(f"{type(value).__name__} has no place in a message of RLlink")


def decode(found: dict[Any, Any]) -> Any:
    """Return what a map stands for, or the map: ``object_hook`` of msgpack's unpacker.

    Raises:
        CodecError: It stands for an array that is not of plain numbers, or contradicts itself.
    """
    marker = found.get(b"nd", found.get("nd"))
    if marker is None:
        if b"complex" in found or "complex" in found:
            raise CodecError("complex numbers have no place in a message of RLlink")
        return found
    kind = _field(found, "kind", default=b"")
    # What stands there may itself be an array, and compares as one.
    if not isinstance(kind, bytes | str) or kind:
        raise CodecError(f"an array of kind {kind!r}; only plain numbers are read")
    dtype = _dtype(_field(found, "type"))
    axes = _field(found, "shape") if marker is True else ()
    array = array_of(dtype, axes, _field(found, "data"))
    return array if marker is True else array[()]


def _field(found: dict[Any, Any], name: str, default: Any = None) -> Any:
    return found.get(name.encode(), found.get(name, default))


def _dtype(text: Any) -> np.dtype[Any]:
    if isinstance(text, bytes):
        text = text.decode("ascii", "replace")
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise CodecError(f"an array of type {str(text)[:40]!r}; only plain numbers are read")
    return np.dtype(text)
