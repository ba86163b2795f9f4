"""Infos of gymnasium's vectors: lanes are selected and merged, values without a form named."""

import reprlib
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def lane_info(infos: Mapping[str, object], lane: int) -> dict[str, object]:
    """Return the infos of one lane of a gymnasium vector environment.

    A vector has arrays, sequences or nested mappings by key, and under ``_key`` a boolean mask of
    the lanes that have it. Arrays of plain numbers become Python scalars. Keys without a mask
    belong to all lanes and are kept unchanged.
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


def lanes_infos(infos: Mapping[str, object], lanes: Sequence[int]) -> dict[str, object]:
    """Return the infos of some lanes, in the form that a vector of just these would give.

    Keys that none of them has are left out; keys without a mask are kept unchanged.
    """
    own: dict[str, object] = {}
    for key, value in infos.items():
        if key.startswith("_") and _flag(infos, key[1:], lanes[0]) is not None:
            continue
        flags = [_flag(infos, key, lane) for lane in lanes]
        if None in flags:
            own[key] = lanes_infos(value, lanes) if isinstance(value, Mapping) else value
        elif any(flags):
            own[key], own[f"_{key}"] = _entries(value, lanes), np.array(flags, np.bool_)
    return own


def lane_entries(key: str, entries: Mapping[int, object], num_lanes: int) -> dict[str, object]:
    """Return an info of some lanes as gymnasium's vectors give it: an array and its mask.

    The entries are neither numbers nor mappings, for which gymnasium has other forms.
    """
    array, mask = np.full(num_lanes, None, object), np.zeros(num_lanes, np.bool_)
    for lane, entry in entries.items():
        array[lane], mask[lane] = entry, True
    return {key: array, f"_{key}": mask}


def with_arrays(
    infos: Mapping[str, object], shared: Collection[str], lanes: Sequence[int], num_lanes: int
) -> dict[str, object]:
    """Return ``infos`` with an array, as gymnasium's vectors have it, for each value that has none.

    An endpoint may give the infos under ``shared`` keys once for all ``lanes`` of the response,
    without a mask. Where a mask names lanes, but the value is not one per lane, such as the text
    that replaces a value that is too large, it belongs to each of these lanes.
    """
    found = dict(infos)
    for key, value in infos.items():
        if isinstance(value, Mapping):
            found[key] = with_arrays(value, (), lanes, num_lanes)
        elif not isinstance(value, np.ndarray):
            mask = _mask(infos, key)
            if mask is None and key in shared:
                found |= lane_entries(key, dict.fromkeys(lanes, value), num_lanes)
            elif mask is not None and not _has_entry(value, num_lanes - 1):
                owners = np.flatnonzero(mask).tolist()
                found |= lane_entries(key, dict.fromkeys(owners, value), num_lanes)
    return found


def merged_infos(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Return the union of the infos that two steps of different lanes of a vector gave.

    The second wins where both have a lane, or a key without a mask. Values that fit into no common
    array become an array of objects, with None in lanes that have none. Lists under a key without a
    mask are joined.
    """
    merged = dict(first)
    for key, value in second.items():
        if key.startswith("_") and key[1:] in second and key[1:] in first:
            continue
        former = first.get(key)
        masks = _mask(first, key), _mask(second, key)
        if masks[0] is not None and masks[1] is not None and len(masks[0]) == len(masks[1]):
            merged[key] = _merged(former, value, masks[0], masks[1])
            merged[f"_{key}"] = masks[0] | masks[1]
        elif isinstance(former, list) and isinstance(value, list):
            merged[key] = [*former, *value]
        else:
            merged[key] = value
            if f"_{key}" in second:
                merged[f"_{key}"] = second[f"_{key}"]
    return merged


def _mask(infos: Mapping[str, object], key: str) -> NDArray[np.bool_] | None:
    mask = np.asarray(infos.get(f"_{key}", ())) if key in infos else None
    return mask if mask is not None and mask.dtype == np.bool_ and mask.ndim == 1 else None


def _merged(
    first: object, second: object, has_first: NDArray[np.bool_], has_second: NDArray[np.bool_]
) -> object:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        return merged_infos(first, second)
    is_array = isinstance(first, np.ndarray) and isinstance(second, np.ndarray)
    if is_array and (first.shape, first.dtype) == (second.shape, second.dtype):  # type: ignore[attr-defined]
        both = np.array(first)
        both[has_second] = second[has_second]  # type: ignore[index]
        return both
    objects = np.full(len(has_first), None, object)
    for lane in range(len(has_first)):
        if has_first[lane] or has_second[lane]:
            objects[lane] = _entry(second if has_second[lane] else first, lane)
    return objects


def _flag(infos: Mapping[str, object], key: str, lane: int) -> bool | None:
    """Return the entry of the mask of ``key`` for ``lane``; None where a peer has sent no mask."""
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


def _entries(value: object, lanes: Sequence[int]) -> object:
    if isinstance(value, Mapping):
        return lanes_infos(value, lanes)
    if not all(_has_entry(value, lane) for lane in lanes):
        return value
    if isinstance(value, np.ndarray):
        return value[list(lanes)]
    return [value[lane] for lane in lanes]  # type: ignore[index]  # it has those entries


def _has_entry(value: object, lane: int) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and len(value) > lane
    return isinstance(value, (list, tuple)) and len(value) > lane


# --- texts in place of values that have no wire form ---

LEFT_OUT_KEY = "rlmesh_ray.left_out"
"""Key of the infos for the notice that entries were left out or made text."""
CONTAINERS = (Mapping, list, tuple, set, frozenset, np.ndarray)
"""Types whose values have parts."""


def bounded_repr(value: object) -> str:
    return _BOUNDED_REPR.repr(value)


def type_repr(value: object) -> str:
    return f"<{type(value).__name__}>"


_MAX_BITS = 4096


class _BoundedRepr(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 2
        self.maxdict = self.maxlist = self.maxtuple = 16
        self.maxset = self.maxfrozenset = 256
        self.maxstring = self.maxother = self.maxlong = 200

    def repr_int(self, x: int, level: int) -> str:
        """Name the type of a large integer; ``Repr`` would write all digits and cut them then."""
        return type_repr(x) if x.bit_length() > _MAX_BITS else super().repr_int(x, level)

    def repr_instance(self, x: object, level: int) -> str:
        """Name the type of another container; its ``repr`` would go through all its parts."""
        return type_repr(x) if isinstance(x, CONTAINERS) else super().repr_instance(x, level)


_BOUNDED_REPR = _BoundedRepr()
