"""Conversion of a vector environment's infos to one dict for each lane."""

from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from rlmesh_ray.spaces.vector_infos import lane_info


class NoInfos(Sequence[dict[str, Any]]):
    """The infos of lanes that have none: each access returns a new empty dict.

    One stored dict for each lane and step, most of them never read, would keep the garbage
    collector busy.

    Args:
        num_lanes: Number of lanes of the vector.
    """

    __slots__ = ("_num_lanes",)

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes

    def __len__(self) -> int:
        return self._num_lanes

    @overload
    def __getitem__(self, lane: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, lane: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, lane: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(lane, slice):
            return NoInfos(len(range(*lane.indices(self._num_lanes))))
        if not -self._num_lanes <= lane < self._num_lanes:
            raise IndexError(f"lane {lane} of {self._num_lanes}")
        return {}


def lane_infos(infos: Mapping[str, object], num_lanes: int) -> Sequence[dict[str, Any]]:
    """Return the ``lane_info`` of each lane, at less cost where there are many.

    Args:
        infos: Infos in the form of gymnasium's vector environments.
        num_lanes: Number of lanes of the vector.

    Returns:
        One dict for each lane, shared with no other lane.
    """
    if not infos:
        return NoInfos(num_lanes)
    if all(_is_usual(infos, key, num_lanes) for key in infos):
        return _taken_apart(infos, num_lanes)
    return [lane_info(infos, lane) for lane in range(num_lanes)]


def joined(parts: Sequence[Sequence[dict[str, Any]]]) -> Sequence[dict[str, Any]]:
    if all(isinstance(part, NoInfos) for part in parts):
        return NoInfos(sum(map(len, parts)))
    return [info for part in parts for info in part]


def _is_usual(infos: Mapping[str, object], key: str, num_lanes: int) -> bool:
    """Return whether a key holds an array with one entry a lane, or is the mask of such a key."""
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
