"""Columns of several batches: side by side, apart again, and one over the other."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from rlmesh_ray.spaces.leaves import Column


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
