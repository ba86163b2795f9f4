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
        if key.startswith("_") and _flag(infos, key[1:], lane) is not None:
            continue
        flag = _flag(infos, key, lane)
        if flag is None:
            own[key] = lane_info(value, lane) if isinstance(value, Mapping) else value
        elif flag:
            own[key] = _entry(value, lane)
    return own


def _flag(infos: Mapping[str, object], key: str, lane: int) -> bool | None:
    """Return what the mask of ``key`` says of ``lane``; None if there is none, or no mask.

    A peer may send anything under such a key.
    """
    mask = infos.get(f"_{key}") if key in infos else None
    if not _has_entry(mask, lane):
        return None
    flag = mask[lane]  # type: ignore[index]  # it has that entry
    return bool(flag) if isinstance(flag, (bool, int, np.bool_)) else None


def _entry(value: object, lane: int) -> object:
    if isinstance(value, Mapping):
        return lane_info(value, lane)
    if not _has_entry(value, lane):
        return value
    entry = value[lane]  # type: ignore[index]
    return entry.item() if isinstance(entry, np.generic) else entry


def _has_entry(value: object, lane: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) > lane
    return isinstance(value, (list, tuple)) and len(value) > lane
