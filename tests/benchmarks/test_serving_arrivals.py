import itertools
import random
import statistics

import pytest

from benchmarks.serving.arrivals import poisson


def test_arrivals_come_in_order_and_in_time() -> None:
    times = poisson(100.0, 10.0, random.Random(0))

    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 10.0


def test_the_gaps_have_the_mean_and_the_spread_of_a_poisson_process() -> None:
    times = poisson(1000.0, 100.0, random.Random(0))

    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]

    assert len(times) == pytest.approx(100_000, rel=0.02)
    assert statistics.mean(gaps) == pytest.approx(1e-3, rel=0.02)
    # Exponential gaps: as wide as their mean. Evenly spaced ones would have none.
    assert statistics.stdev(gaps) == pytest.approx(1e-3, rel=0.03)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert poisson(10.0, 5.0, random.Random(7)) == poisson(10.0, 5.0, random.Random(7))
    assert poisson(10.0, 5.0, random.Random(7)) != poisson(10.0, 5.0, random.Random(8))
