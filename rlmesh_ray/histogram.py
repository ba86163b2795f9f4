"""Histograms of durations and batch sizes.

Counting a value takes a few integer additions and no lock: there is one writer. The counters may
lie in memory that another process reads.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

NS_PER_S = 10**9
DURATION_BOUNDS_NS = (
    *(digit * 10**power for power in range(4, 10) for digit in (1, 2, 5)),
    10**10,
)
"""Bucket bounds from 10 us to 10 s: no bucket is wider than 2.5 times its lower bound."""
BATCH_BOUNDS_ROWS = tuple(2**power for power in range(13))
"""Bucket bounds from 1 to 4096 rows."""
CounterArray = list[int] | memoryview


@dataclass(frozen=True, slots=True)
class Histogram:
    """Snapshot of the counts of a histogram."""

    bounds: tuple[float, ...]
    """Upper bounds of all buckets but the last; a value on a bound is in the bucket below."""
    counts: tuple[int, ...]
    """Counts of the buckets, not cumulative: one more than ``bounds``."""
    total: float
    """Sum of the values."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Mean of the values; None without any."""
        return self.total / self.count if self.count else None

    def cumulative(self) -> tuple[int, ...]:
        """Return the number of values in each bucket or below it; the last entry is ``count``."""
        return tuple(accumulate(self.counts))

    def quantile(self, share: float) -> float | None:
        """Return an estimate of the value below which ``share`` of all values lie.

        Values are taken as evenly spread within a bucket, as in Prometheus. Beyond the last bound
        the estimate is that bound.

        Args:
            share: From 0 to 1; 0.5 is the median.

        Returns:
            The estimate; None without values.
        """
        rank, below = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and below + count >= rank:
                if index == len(self.bounds):
                    return self.bounds[-1]
                lower = self.bounds[index - 1] if index else 0.0
                return lower + (self.bounds[index] - lower) * max(0.0, rank - below) / count
            below += count
        return None

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return the counts added since an ``earlier`` snapshot of the same histogram."""
        counts = zip(self.counts, earlier.counts, strict=True)
        return Histogram(
            self.bounds,
            tuple(now - before for now, before in counts),
            self.total - earlier.total,
        )


class HistogramCounter:
    """Counts integers for a histogram, in ``counters``: ``num_counters(bounds)`` zeros."""

    __slots__ = ("_bounds", "_counters")

    def __init__(self, bounds: tuple[int, ...], counters: CounterArray | None = None) -> None:
        self._bounds = bounds
        self._counters: CounterArray = [0] * num_counters(bounds) if counters is None else counters

    def add(self, value: int) -> None:
        counters = self._counters
        counters[bisect_left(self._bounds, value)] += 1
        counters[-1] += value

    def read(self) -> tuple[int, ...]:
        """Return the counters: one for each bucket, then the sum of the values."""
        return tuple(self._counters)


def num_counters(bounds: Sequence[int]) -> int:
    return len(bounds) + 2  # one for the values above all bounds, one for the sum


def histogram_of(bounds: Sequence[int], reading: Sequence[int], unit: int = 1) -> Histogram:
    """Return the histogram of a ``HistogramCounter``'s reading, or of the sum of several.

    Bounds and total are divided by ``unit``: ``NS_PER_S`` turns nanoseconds into seconds.
    """
    *counts, total = reading
    return Histogram(tuple(bound / unit for bound in bounds), tuple(counts), total / unit)
