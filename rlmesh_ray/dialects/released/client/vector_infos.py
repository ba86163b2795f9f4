"""Infos of released endpoints, converted to those of gymnasium's vector environments.

They have one of three forms, with lists in place of arrays:

* for one lane, in a session of any width: the environment's own info;
* for lanes that are single environments: ``final_info``, a list of their infos, one a lane;
* for a vector environment: gymnasium's form.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.protocol.messages import Infos
from rlmesh_ray.spaces.vector_infos import lane_info

_FINAL_INFO = "final_info"
_MAX_AXES = 32
_WARNING = "rlmesh.conformance.warning"
_NUMBERS: tuple[tuple[set[type], type], ...] = (
    ({bool}, np.bool_),
    ({int}, np.int64),
    ({int, float}, np.float64),
)
"""Kinds of values that become arrays, and of which dtype."""


def as_vector_infos(lane_infos: Infos, lanes: Sequence[int], num_lanes: int) -> dict[str, object]:
    """Return infos as an endpoint of this package sends them: arrays by key, masks by ``_key``.

    The dtypes are those that gymnasium gives to Python's numbers, since the infos have none.

    Args:
        lane_infos: The infos of ``lanes``, in their order.
        lanes: Indices.
        num_lanes: Width of the session.
    """
    if not lane_infos:
        return {}
    warning = lane_infos.get(_WARNING)
    own = {key: value for key, value in lane_infos.items() if key != _WARNING}
    infos = _vector_infos(own, lanes, num_lanes)
    if warning is not None:
        infos[_WARNING] = _warning_texts(warning)
    return infos


def _vector_infos(lane_infos: Infos, lanes: Sequence[int], num_lanes: int) -> dict[str, object]:
    final = lane_infos.get(_FINAL_INFO)
    if len(lanes) == 1:
        return _joined({lanes[0]: lane_infos}, num_lanes)
    if isinstance(final, list) and len(final) == len(lanes) and _are_mappings(final):
        parts = [{key: info[key] for key in info if key != _WARNING} for info in final]
        return _joined(dict(zip(lanes, parts, strict=True)), num_lanes)
    if tuple(lanes) == tuple(range(num_lanes)):
        return _with_arrays(lane_infos, num_lanes)
    return _joined({lane: lane_info(lane_infos, at) for at, lane in enumerate(lanes)}, num_lanes)


def _are_mappings(values: Sequence[object]) -> bool:
    return all(isinstance(value, Mapping) for value in values)


def _joined(infos: Mapping[int, Infos], num_lanes: int) -> dict[str, object]:
    """Return the infos of lanes as those of a vector.

    Args:
        infos: By lane.
        num_lanes: Of the vector.
    """
    joined: dict[str, object] = {}
    for key in dict.fromkeys(key for info in infos.values() for key in info):
        values = {lane: info[key] for lane, info in infos.items() if key in info}
        mask = np.zeros(num_lanes, np.bool_)
        mask[list(values)] = True
        joined[key] = _entries(values, num_lanes)
        joined[f"_{key}"] = mask
    return joined


def _entries(values: Mapping[int, Any], num_lanes: int) -> object:
    if _are_mappings(list(values.values())):
        return _joined(values, num_lanes)
    dtype = _dtype([*values.values()])
    entries: NDArray[Any] = (
        np.full(num_lanes, None, object) if dtype is None else np.zeros(num_lanes, dtype)
    )
    for lane, value in values.items():
        entries[lane] = value
    return entries


def _dtype(values: Sequence[object]) -> type | None:
    """Return the dtype of an array of ``values``; None: they are no numbers."""
    kinds = set(map(type, values))
    return next((dtype for own, dtype in _NUMBERS if kinds and kinds <= own), None)


def _with_arrays(infos: Infos, num_lanes: int, *, is_masked: bool = False) -> dict[str, object]:
    """Return infos in gymnasium's form with arrays where gymnasium has them.

    Args:
        infos: With lists.
        num_lanes: Of the vector.
        is_masked: Whether a mask outside tells which lanes have what is in here.
    """
    found: dict[str, object] = {}
    for key, value in infos.items():
        has_mask = _is_mask(infos.get(f"_{key}"), num_lanes)
        if isinstance(value, Mapping):
            found[key] = _with_arrays(value, num_lanes, is_masked=has_mask or is_masked)
        elif _is_mask(value, num_lanes) and key.startswith("_") and key[1:] in infos:
            found[key] = np.array(value, np.bool_)
        elif isinstance(value, list) and (has_mask or (is_masked and len(value) == num_lanes)):
            found[key] = _array(value)
        else:
            found[key] = value
    return found


def _is_mask(value: object, num_lanes: int) -> bool:
    return isinstance(value, list) and len(value) == num_lanes and set(map(type, value)) == {bool}


def _array(values: list[Any]) -> NDArray[Any]:
    """Return an array with one entry a lane: of numbers, of arrays of one shape, or of objects."""
    flat, shape = _flattened(values)
    dtype = _dtype(flat)
    if dtype is not None:
        return np.array(flat, dtype).reshape(shape)
    array = np.empty(len(values), object)
    for lane, value in enumerate(values):
        array[lane] = value
    return array


def _flattened(values: list[Any]) -> tuple[list[Any], tuple[int, ...]]:
    """Return the numbers in lists in lists, and their shape; none where they have no shape."""
    shape: tuple[int, ...] = (len(values),)
    while values and len(shape) < _MAX_AXES and all(type(value) is list for value in values):
        sizes = {len(value) for value in values}
        if len(sizes) > 1:
            return [], shape
        shape = (*shape, *sizes)
        values = [part for value in values for part in value]
    return values, shape


def _warning_texts(warning: object) -> object:
    """Return warnings as texts, in the edition's form."""
    if not isinstance(warning, list):
        return warning
    return [_warning_text(each) for each in warning]


def _warning_text(warning: object) -> str:
    if not isinstance(warning, Mapping):
        return str(warning)
    kind, path, detail = (str(warning.get(name, "")) for name in ("kind", "path", "detail"))
    return f"{kind}{path.removeprefix('$')}: {detail.removeprefix(f'{path}: ')}"
