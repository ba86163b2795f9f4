"""Settings of worlds and agents to plain values."""

from collections.abc import Mapping
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import Array, DataType, kind_of, unpack_tensor
from rlmesh_ray.errors import CodecError

MAX_ELEMENTS = 2**20
"""Limit for all settings of a request."""
MAX_SETTINGS_BYTES = 2**20
"""Limit of this package's servers for the settings of a request."""
MAX_EQUAL_ELEMENTS = 2**16
"""Limit for those that one element stands for: a few bytes are enough for any number of them."""


def plain_settings(settings: Mapping[str, Any]) -> dict[str, object]:
    """Return ``settings``, ``pb.Tensor`` by key, as plain values.

    Returns:
        By key: Python scalars and strings, lists of strings, arrays of numbers.

    Raises:
        CodecError: One is malformed, or holds messages, or there is too much of them.
    """
    plain = {}
    room = MAX_ELEMENTS
    for key in settings:
        array = _array(f"setting {key!r}", settings[key], room)
        plain[key] = _plain(array)
        room -= array.size
    return plain


def plain_setting(name: str, tensor: Any) -> object:
    """Return one setting, or the value of a property; errors have its ``name``.

    Raises:
        CodecError: It is malformed, or holds messages, or too much.
    """
    return _plain(_array(name, tensor, MAX_ELEMENTS))


def _array(name: str, tensor: Any, max_elements: int) -> Array:
    if kind_of(tensor, name) is DataType.PROTO:
        raise CodecError(f"{name} holds a message; give numbers or text")
    array = unpack_tensor(tensor, name)
    if array.size > max_elements:
        raise CodecError(
            f"{name} has {array.size} elements, and one request may have {MAX_ELEMENTS} in all"
        )
    if 0 in array.strides and array.size > MAX_EQUAL_ELEMENTS:
        raise CodecError(
            f"{name} stands for {array.size} equal elements, and {MAX_EQUAL_ELEMENTS} are the limit"
        )
    return array


def _plain(array: Array) -> object:
    if not array.ndim:
        value: object = array.item()
        return value
    return array.tolist() if array.dtype == object else array.copy()
