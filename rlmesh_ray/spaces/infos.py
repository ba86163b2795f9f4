"""Infos of one lane, out of those of a vector."""

from collections.abc import Mapping

import numpy as np


def lane_info(infos: Mapping[str, object], lane: int) -> dict[str, object]:
    """Return what ``infos`` say of ``lane``.

    Args:
        infos: As gymnasium's vector environments give them: arrays, sequences or nested
            mappings by key, and a boolean mask by ``_key`` that tells which lanes have it.
        lane: Index.

    Returns:
        The lane's own infos, with Python scalars where the array holds plain numbers. Keys
        without a mask are shared by all lanes and kept as they are.
    """
    own: dict[str, object] = {}
    for key, value in infos.items():
        mask = infos.get(f"_{key}")
        if key.startswith("_") and key[1:] in infos:
            continue
        if mask is None:
            own[key] = lane_info(value, lane) if isinstance(value, Mapping) else value
        elif np.asarray(mask)[lane]:
            own[key] = _entry(value, lane)
    return own


def _entry(value: object, lane: int) -> object:
    if isinstance(value, Mapping):
        return lane_info(value, lane)
    entry = value[lane]  # type: ignore[index]  # an array or sequence with one entry a lane
    return entry.item() if isinstance(entry, np.generic) else entry
