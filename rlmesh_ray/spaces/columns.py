"""Operations on columns: concatenating and splitting batches, replacing and writing lanes."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.errors import ConformanceError
from rlmesh_ray.spaces.coercion import as_array, coerce
from rlmesh_ray.spaces.leaves import Column, Leaf


def concatenate(batches: Sequence[Sequence[Column]]) -> list[Column]:
    """Return one batch with the lanes of all ``batches``, in order.

    Args:
        batches: At least one, all of one space. A single one is returned without a copy.
    """
    if len(batches) == 1:
        return list(batches[0])
    joined: list[Column] = []
    for columns in zip(*batches, strict=True):
        if isinstance(columns[0], tuple):
            joined.append(tuple(text for column in columns for text in column))
        else:
            joined.append(np.concatenate(columns))
    return joined


def split(columns: Sequence[Column], counts: Sequence[int]) -> list[list[Column]]:
    """Split a batch into one batch for each of ``counts``, with that many lanes, as views."""
    ends = list(accumulate(counts))
    return [
        [column[end - count : end] for column in columns]
        for end, count in zip(ends, counts, strict=True)
    ]


def chunk_steps(leaf: Leaf, value: Any, num_rows: int, horizon: int) -> list[Any]:
    """Split one leaf's chunks by step: the batches ``(num_rows, *leaf.shape)``, unconverted.

    Args:
        leaf: The leaf that the value belongs to.
        value: Array or nested sequence ``(num_rows, horizon, *leaf.shape)``.
        num_rows: Expected number of rows.
        horizon: Expected number of steps.

    Raises:
        ConformanceError: It has another shape, or chunks of unequal length.
    """
    wanted = (num_rows, horizon, *leaf.shape)
    problem = ""
    try:
        array = value if hasattr(value, "shape") else as_array(leaf, value)
    except ConformanceError as error:  # of unequal lengths
        problem = error.reason
    else:
        if tuple(array.shape) != wanted:
            problem = f"has shape {tuple(array.shape)}"
    if problem:
        reason = f"{problem}, expected {wanted} (rows, horizon, *action)"
        raise ConformanceError("structure", leaf.name, reason)
    return [array[:, step] for step in range(horizon)]


def horizon_hint(shape: Sequence[int], expected: Sequence[int]) -> str:
    """Return the remedy where an array of single actions has an axis for a chunk; else empty."""
    if len(shape) < 2 or (shape[0], *shape[2:]) != tuple(expected):
        return ""
    length = shape[1]
    return f"; if the policy chooses {length} actions at once, give horizon={length} (--horizon)"


def replace_lanes(
    columns: Sequence[Column], other: Sequence[Column], lanes: Sequence[int]
) -> list[Column]:
    """Return ``columns``, whose arrays are changed in place, with the ``lanes`` of ``other``."""
    merged: list[Column] = []
    for column, source in zip(columns, other, strict=True):
        if isinstance(column, tuple):
            merged.append(
                tuple(source[lane] if lane in lanes else text for lane, text in enumerate(column))
            )
        else:
            column[list(lanes)] = np.asarray(source)[list(lanes)]
            merged.append(column)
    return merged


def write_lane_values(
    leaf: Leaf, column: Column, lanes: Sequence[int], values: Sequence[Any]
) -> Column:
    """Coerce one value for each of ``lanes`` and write it into ``column``.

    Args:
        leaf: The leaf of the column.
        column: An array is changed in place.
        lanes: Row indices.
        values: One value for each of ``lanes``, unconverted.

    Returns:
        ``column``; a new tuple for text.

    Raises:
        ConformanceError: As ``coerce``, for the first value that cannot be coerced; an array may
            hold some of the other values by then.
    """
    if isinstance(column, tuple):
        strings = list(column)
        for lane, value in zip(lanes, values, strict=True):
            strings[lane] = coerce(leaf, value, None)
        return tuple(strings)
    put_all = _put_arrays if leaf.shape else _put_numbers
    if lanes != range(len(column)) or not put_all(column, values):
        for lane, value in zip(lanes, values, strict=True):
            column[lane] = coerce(leaf, value, None)
    return column


def _put_numbers(column: NDArray[Any], values: Sequence[Any]) -> bool:
    """Write scalars of exactly the dtype at once; return False, unwritten, for any others."""
    kinds = set(map(type, values))
    if kinds != {column.dtype.type} and (kinds != {int} or column.dtype != np.int64):
        return False
    try:
        column[...] = values
    except OverflowError:
        return False
    return True


def _put_arrays(column: NDArray[Any], values: Sequence[Any]) -> bool:
    """Write arrays of exactly the dtype and shape at once; return False for any others."""
    array, dtype, shape = np.ndarray, column.dtype, column.shape[1:]
    if not column.size or not column.flags.c_contiguous:
        return False
    if [v for v in values if type(v) is not array or v.dtype is not dtype or v.shape != shape]:
        return False
    # Several times faster than numpy.stack.
    np.concatenate(values, out=column.reshape(-1, *shape[1:]))
    return True
