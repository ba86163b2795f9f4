"""Messages in msgpack, with arrays as maps; shared by the dialects that have such messages.

Nothing that is read runs code: msgpack-numpy's own decoder runs pickle on arrays of objects, and
its ``patch``, which parts of RLlib call, makes ``msgpack.unpackb`` do so in the whole process.
"""

import contextlib
import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import CodecError, MissingPackageError, install_command
from rlmesh_ray.spaces.spec import MAX_RANK

_NUMBERS = (int, float, np.number, np.bool_)


def pack(value: object, encode: Callable[[Any], Any]) -> bytes:
    """Return the bytes of maps, sequences, text, bytes and numbers.

    ``encode`` returns such a value for any other one, or raises TypeError. Raises
    MissingPackageError without the package msgpack.
    """
    packed: bytes = _msgpack().Packer(default=encode, use_bin_type=True).pack(value)
    return packed


def unpack(
    data: bytes, *, max_items: int, max_values: int, read_map: Callable[[dict[Any, Any]], Any]
) -> Any:
    """Return the value in a message from a peer.

    ``max_values`` counts lists, maps and items, but not an array's numbers. ``read_map`` returns
    what a map stands for, or raises CodecError; so does a message that is not msgpack, has an
    extension, or exceeds a limit. Raises MissingPackageError without the package msgpack.
    """
    num_values = 0

    def count(num_items: int) -> None:
        nonlocal num_values
        num_values += 1 + num_items
        if num_values > max_values:
            raise CodecError(
                f"the message has more than {max_values} values; send arrays instead of lists, or "
                "less at a time"
            )

    def read_list(items: list[Any]) -> list[Any]:
        count(len(items))
        return items

    def read_entries(entries: dict[Any, Any]) -> Any:
        count(len(entries))
        return read_map(entries)

    most_items = min(max_items, len(data))
    msgpack = _msgpack()
    try:
        # msgpack allocates what a list's header announces before it reads the items, and lists
        # can nest: first look whether all items are there, which allocates nothing.
        whole = msgpack.Unpacker(max_buffer_size=max(len(data), 1))
        whole.feed(data)
        whole.skip()
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=False,  # keys of arrays are bytes
            ext_hook=_refuse_extension,
            max_array_len=most_items,
            max_map_len=most_items,
            list_hook=read_list,
            object_hook=read_entries,
        )
    except CodecError:
        raise
    # msgpack's own errors are not all derived from ValueError, nor from one base.
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise CodecError(f"this is not msgpack: {reason}") from error


def array_of(dtype: np.dtype[Any], axes: object, data: object) -> NDArray[Any]:
    """Return an array of plain numbers from a peer as a read-only view of its bytes.

    Raises CodecError where ``axes`` is not a shape, ``data`` is not bytes, or they contradict each
    other.
    """
    if (
        not isinstance(axes, list | tuple)
        or len(axes) > MAX_RANK + 1
        or not all(type(axis) is int and 0 <= axis < 2**31 for axis in axes)
    ):
        raise CodecError(f"an array has the shape {str(axes)[:40]}")
    if not isinstance(data, bytes):
        raise CodecError("the data of an array is no binary value")
    # Python's integers do not overflow, where NumPy's would.
    if len(data) != dtype.itemsize * math.prod(axes):
        raise CodecError(f"an array of {dtype} and shape {(*axes,)} comes with {len(data)} bytes")
    array = np.frombuffer(data, dtype).reshape(axes)
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise CodecError("an array of truth values has one that is neither 0 nor 1")
    return array


def holds_numbers(value: object) -> bool:
    """Tell whether a peer's value is an array, or has nothing but numbers at the bottom of lists.

    NumPy would make all items as wide as the longest text among them: of a kilobyte, gigabytes.
    Raises ValueError for lists of unequal lengths, RecursionError where they are nested too deep.
    """
    if isinstance(value, np.ndarray):
        return True
    if isinstance(value, list) and all(isinstance(each, np.ndarray) for each in value):
        return True
    bottom = np.array(value, dtype=object).ravel().flat  # an array of many axes has no flat
    return all(issubclass(kind, _NUMBERS) for kind in set(map(type, bottom)))


def _refuse_extension(code: int, _data: bytes) -> Any:
    raise CodecError(f"an extension of msgpack, of type {code}, has no meaning in this protocol")


def _msgpack() -> Any:
    """Return msgpack's implementation, beneath the names that ``msgpack_numpy.patch`` replaces."""
    # Not at the top: only some dialects need it.
    for name in ("msgpack._cmsgpack", "msgpack.fallback"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    raise MissingPackageError(
        f"messages in msgpack need: {install_command('openpi')}, or pip install msgpack"
    )
