"""The infos of all lanes, out of those of a vector."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlmesh_ray.spaces.infos import lane_info


def lane_infos(infos: Mapping[str, object], num_lanes: int) -> list[dict[str, Any]]:
    """Return what ``lane_info`` does for each lane, at less cost where there are many.

    Args:
        infos: As gymnasium's vector environments give them.
        num_lanes: Of the vector.

    Returns:
        One dict a lane; none of them is another's.
    """
    if all(_is_usual(infos, key, num_lanes) for key in infos):
        return _taken_apart(infos, num_lanes)
    return [lane_info(infos, lane) for lane in range(num_lanes)]


def _is_usual(infos: Mapping[str, object], key: str, num_lanes: int) -> bool:
    """Tell whether a key holds an array with one entry a lane, or is the mask of one that does."""
    if key.startswith("_"):
        return key[1:] in infos and f"_{key}" not in infos and not key.startswith("__")
    value, mask = infos[key], infos.get(f"_{key}")
    return (
        type(value) is np.ndarray
        and type(mask) is np.ndarray
        and mask.dtype == np.bool_
        and value.shape[:1] == mask.shape == (num_lanes,)
    )


def _taken_apart(infos: Mapping[str, Any], num_lanes: int) -> list[dict[str, Any]]:
    own: list[dict[str, Any]] = [{} for _ in range(num_lanes)]
    for key, value in infos.items():
        if key.startswith("_"):
            continue
        # Python's scalars, as from lane_info; NumPy's own where an array holds objects.
        is_plain = value.ndim == 1 and value.dtype != object
        entries = value.tolist() if is_plain else list(map(_entry, value))
        for lane in np.flatnonzero(infos[f"_{key}"]).tolist():
            own[lane][key] = entries[lane]
    return own


def _entry(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
