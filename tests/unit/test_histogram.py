import math
from array import array
from itertools import pairwise

import pytest

from rlmesh_ray.histogram import (
    BATCH_BOUNDS_ROWS,
    DURATION_BOUNDS_NS,
    NS_PER_S,
    Histogram,
    HistogramCounter,
    histogram_of,
    num_counters,
)

BOUNDS = (1, 2, 4)


def counted(*values: int) -> Histogram:
    buckets = HistogramCounter(BOUNDS)
    for value in values:
        buckets.add(value)
    return histogram_of(BOUNDS, buckets.read())


def test_a_value_on_a_bound_is_below_it() -> None:
    assert counted(1, 2, 3, 4, 5).counts == (1, 1, 2, 1)


def test_the_last_of_the_cumulative_counts_has_all_values() -> None:
    histogram = counted(1, 2, 3, 4, 5)

    assert histogram.cumulative() == (1, 2, 4, 5)
    assert histogram.count == 5


def test_the_mean_is_exact_and_does_not_come_from_the_buckets() -> None:
    assert counted(1, 3, 100).mean == pytest.approx(104 / 3)
    assert counted().mean is None


def test_a_quantile_lies_where_values_that_are_evenly_spread_would_have_it() -> None:
    histogram = counted(3, 3, 3, 3)

    assert histogram.quantile(0.5) == pytest.approx(3.0)
    assert histogram.quantile(1.0) == pytest.approx(4.0)
    assert histogram.quantile(0.0) == pytest.approx(2.0)


def test_a_quantile_beyond_the_last_bound_is_that_bound() -> None:
    assert counted(1000).quantile(0.5) == 4


def test_there_is_no_quantile_of_nothing() -> None:
    assert counted().quantile(0.5) is None


def test_what_has_come_since_an_earlier_look_is_the_difference() -> None:
    earlier, later = counted(1, 3), counted(1, 3, 3, 9)

    assert later.since(earlier) == counted(3, 9)


def test_the_counts_are_given_in_another_unit() -> None:
    counter = HistogramCounter(DURATION_BOUNDS_NS)
    counter.add(1_500_000)
    counter.add(500_000_000)

    histogram = histogram_of(DURATION_BOUNDS_NS, counter.read(), NS_PER_S)

    assert histogram.count == 2
    assert histogram.total == pytest.approx(0.5015)
    assert histogram.bounds[0] == 1e-5
    assert histogram.bounds[-1] == 10.0


def test_the_slots_may_lie_in_memory_that_another_process_reads() -> None:
    memory = memoryview(array("q", [0] * num_counters(BOUNDS)))
    HistogramCounter(BOUNDS, memory).add(3)

    assert HistogramCounter(BOUNDS, memory).read() == (0, 0, 1, 0, 3)


@pytest.mark.parametrize("bounds", [DURATION_BOUNDS_NS, BATCH_BOUNDS_ROWS])
def test_bounds_grow_in_steps_that_tell_values_apart(bounds: tuple[int, ...]) -> None:
    ratios = [upper / lower for lower, upper in pairwise(bounds)]

    assert all(1 < ratio <= 2.5 and math.isfinite(ratio) for ratio in ratios)


def test_a_quantile_lies_in_its_bucket_where_its_rank_does_among_the_bucket_s_values() -> None:
    histogram = Histogram((10.0, 20.0), (50, 50, 0), 0.0)

    assert [histogram.quantile(share) for share in (0.1, 0.5, 0.75, 1.0)] == [2.0, 10.0, 15.0, 20.0]
