"""Counts by size: how long something took, how many rows a batch had.

A few integer additions for each value, and no lock: there is one writer. The counters may lie in
memory that another process reads.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

NS_PER_S = 10**9
DURATION_BOUNDS_NS = (
    *(digit * 10**power for power in range(4, 10) for digit in (1, 2, 5)),
    10**10,
)
"""From 10 us to 10 s: no bucket is wider than two and a half times its lower end."""
BATCH_BOUNDS_ROWS = tuple(2**power for power in range(13))
"""From 1 to 4096."""


class CounterArray(Protocol):
    """Integers: a list, or a view of memory."""

    def __iter__(self) -> Iterator[int]: ...
    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Histogram:
    """What has been counted up to some moment."""

    bounds: tuple[float, ...]
    """Upper bounds of all buckets but the last; a value on a bound is below it."""
    counts: tuple[int, ...]
    """One a bucket, not cumulative: one more than ``bounds``."""
    total: float
    """Sum of the values."""

    @property
    def count(self) -> int:
        """How many values there were."""
        return sum(self.counts)

    @property
    def mean(self) -> float | None:
        """Their mean; None: there were none."""
        return self.total / self.count if self.count else None

    def cumulative(self) -> tuple[int, ...]:
        """Return for each bucket how many values are in it or below; the last has all of them."""
        return tuple(accumulate(self.counts))

    def quantile(self, share: float) -> float | None:
        """Return an estimate of the value below which ``share`` of all values lie.

        Within a bucket the values count as evenly spread, as in Prometheus. Beyond the last bound
        there is nothing to tell them apart by: the answer is that bound.

        Args:
            share: From 0 to 1; 0.5 is the median.

        Returns:
            None: There were no values.
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
        """Return what has come after an ``earlier`` snapshot of the same histogram."""
        counts = zip(self.counts, earlier.counts, strict=True)
        return Histogram(
            self.bounds,
            tuple(now - before for now, before in counts),
            self.total - earlier.total,
        )


class HistogramCounter:
    """A histogram that is being counted, in whole numbers.

    Args:
        bounds: See ``Histogram``.
        counters: Where to count, ``num_counters`` of them, zeros at first; default: in a list.
    """

    __slots__ = ("_bounds", "_counters")

    def __init__(self, bounds: tuple[int, ...], counters: CounterArray | None = None) -> None:
        self._bounds = bounds
        self._counters: CounterArray = [0] * num_counters(bounds) if counters is None else counters

    def add(self, value: int) -> None:
        """Count one value."""
        counters = self._counters
        counters[bisect_left(self._bounds, value)] += 1
        counters[-1] += value

    def read(self) -> tuple[int, ...]:
        """Return the slots as they are: one a bucket, and the sum of the values."""
        return tuple(self._counters)

    def merge(self, counters: Iterable[int]) -> None:
        """Count what another one with the same bounds has counted, as ``read`` returned it."""
        for index, value in enumerate(counters):
            self._counters[index] += value


def num_counters(bounds: Sequence[int]) -> int:
    """Return how many integers ``HistogramCounter`` need."""
    return len(bounds) + 2


def histogram_of(
    bounds: Sequence[int], readings: Iterable[Sequence[int]], unit: int = 1
) -> Histogram:
    """Return the sum of what several ``HistogramCounter`` with the same bounds have counted.

    Args:
        bounds: Theirs.
        readings: What their ``read`` returned.
        unit: How many of theirs make one: ``NS_PER_S`` turns nanoseconds into seconds.
    """
    sums = [0] * num_counters(bounds)
    for reading in readings:
        sums = [one + other for one, other in zip(sums, reading, strict=True)]
    *counts, total = sums
    return Histogram(tuple(bound / unit for bound in bounds), tuple(counts), total / unit)
