"""Columns from lanes, and of several batches: side by side, apart again, one over the other."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.spaces.coercion import coerce
from rlmesh_ray.spaces.leaves import Column, Leaf


def concatenate(batches: Sequence[Sequence[Column]]) -> list[Column]:
    """Return one batch with the lanes of all ``batches``, in order.

    Args:
        batches: At least one; all of one space. A single one is returned as it is, uncopied.
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
    """Return one batch for each of ``counts``, with that many lanes; arrays are views."""
    ends = list(accumulate(counts))
    return [
        [column[end - count : end] for column in columns]
        for end, count in zip(ends, counts, strict=True)
    ]


def replace_lanes(
    columns: Sequence[Column], other: Sequence[Column], lanes: Sequence[int]
) -> list[Column]:
    """Put the rows of ``lanes`` from ``other`` into ``columns``, whose arrays are written to."""
    merged: list[Column] = []
    for mine, theirs in zip(columns, other, strict=True):
        if isinstance(mine, tuple):
            merged.append(
                tuple(theirs[lane] if lane in lanes else text for lane, text in enumerate(mine))
            )
        else:
            mine[list(lanes)] = np.asarray(theirs)[list(lanes)]
            merged.append(mine)
    return merged


def write_lane_values(
    leaf: Leaf, column: Column, lanes: Sequence[int], values: Sequence[Any]
) -> Column:
    """Put one lane's value each into ``column``; return it, or a new one for text.

    Args:
        leaf: What every value must become.
        column: An array is written to.
        lanes: Where the values go.
        values: One for each of ``lanes``, unconverted.

    Raises:
        ConformanceError: As ``coerce`` does for the first value that is not fit; an array may
            hold some of the others.
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
    """Write scalars of exactly the dtype, all at once; return False if they are not that."""
    kinds = set(map(type, values))
    if kinds != {column.dtype.type} and (kinds != {int} or column.dtype != np.int64):
        return False
    try:
        column[...] = values
    except OverflowError:
        return False
    return True


def _put_arrays(column: NDArray[Any], values: Sequence[Any]) -> bool:
    """Write arrays of exactly the dtype and shape, all at once; return False if they are not."""
    array, dtype, shape = np.ndarray, column.dtype, column.shape[1:]
    if not column.size or not column.flags.c_contiguous:
        return False
    if [v for v in values if type(v) is not array or v.dtype is not dtype or v.shape != shape]:
        return False
    # Several times faster than numpy.stack.
    np.concatenate(values, out=column.reshape(-1, *shape[1:]))
    return True
