"""Infos of single environments, joined as gymnasium's vectors join them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rlmesh_ray.spaces.infos import lane_info

AddInfo = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]
"""Gymnasium's own: adds to infos what a lane has given."""


def merge_info(
    add: AddInfo, infos: dict[str, Any], info: dict[str, Any], lane: int, num_lanes: int
) -> None:
    """Add ``info`` to ``infos`` as gymnasium does; what it cannot join stays an object.

    It fails for integers beyond int64, for what contains itself, and where lanes have values of
    different kinds under one key; no info is worth an episode. All keys go at once; only if it
    fails one after the other, which takes several times as long and overwrites what has been
    joined before the failure with the same.
    """
    try:
        add(infos, info, lane)
    except Exception:  # noqa: BLE001  # whatever users put there
        _merge_one_by_one(add, infos, info, lane, num_lanes)


def _merge_one_by_one(
    add: AddInfo, infos: dict[str, Any], info: dict[str, Any], lane: int, num_lanes: int
) -> None:
    for key, value in info.items():
        try:
            add(infos, {key: value}, lane)
        except Exception:  # noqa: BLE001  # whatever users put there
            array = np.full(num_lanes, None, object)
            own = {name: infos[name] for name in (key, f"_{key}") if name in infos}
            for other in np.flatnonzero(infos.get(f"_{key}", ())):
                array[other] = lane_info(own, int(other))[key]
            array[lane] = value
            mask = infos.setdefault(f"_{key}", np.zeros(num_lanes, np.bool_))
            mask[lane] = True
            infos[key] = array
