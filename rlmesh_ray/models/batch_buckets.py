"""Batch buckets: a few batch sizes, for graphs that are compiled or captured once for each size.

A batch is padded up to the next bucket. A batch that is larger than the largest bucket runs as
several, the last of them padded: rounding it up would make an unlimited number of sizes.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from rlmesh_ray.errors import ConfigurationError


class PaddedBatch(NamedTuple):
    """A part of a batch that runs at once."""

    rows: slice
    """Its rows in the batch; with a start and a stop."""
    size: int
    """Number of rows that the module gets: those of the batch first, then padding."""

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


class BatchBuckets:
    """Cuts batches into parts of known sizes.

    Args:
        sizes: Row counts, ascending; none: every batch is one part as it is.

    Raises:
        ConfigurationError: The sizes are not ascending, or below 1.
    """

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.sizes = tuple(sizes)
        """The row counts."""
        # bool is an int, but not a size.
        are_sizes = all(type(size) is int and size > 0 for size in self.sizes)
        if not are_sizes or any(low >= high for low, high in pairwise(self.sizes)):
            raise ConfigurationError(
                f"buckets={list(self.sizes)} must be ascending row counts, such as [1, 8, 64, 512]"
            )

    def parts(self, num_rows: int) -> list[PaddedBatch]:
        if not self.sizes:
            return [PaddedBatch(slice(0, num_rows), num_rows)]
        largest = self.sizes[-1]
        starts = range(0, num_rows, largest)
        return [self._part(start, min(start + largest, num_rows)) for start in starts]

    def _part(self, start: int, stop: int) -> PaddedBatch:
        size = next(size for size in self.sizes if size >= stop - start)
        return PaddedBatch(slice(start, stop), size)
