import numpy as np
import pytest

from benchmarks.statistics import Spread, interval_of_mean, percentiles, ratio
from rlmesh_ray.errors import ConfigurationError


def test_the_median_and_the_quartiles_are_those_of_the_textbook() -> None:
    spread = Spread((5.0, 1.0, 3.0, 2.0, 4.0))

    assert spread.median == 3.0
    assert spread.quartiles == (2.0, 4.0)


def test_no_value_is_left_out_of_the_json_nor_sorted() -> None:
    assert Spread((9.0, 1.0)).as_json() == {
        "median": 5.0,
        "quartiles": [3.0, 7.0],
        "values": [9.0, 1.0],
    }


def test_nothing_measured_is_no_spread() -> None:
    with pytest.raises(ConfigurationError, match="nothing was measured"):
        Spread(())


def test_a_ratio_pairs_repetitions_and_not_medians() -> None:
    # The machine halves its speed in the second repetition, for both.
    assert ratio(Spread((10.0, 5.0)), Spread((20.0, 10.0))).values == (0.5, 0.5)


def test_repetitions_without_a_partner_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="2 repetitions cannot be compared with 1"):
        ratio(Spread((1.0, 2.0)), Spread((1.0,)))


def test_percentiles_are_values_that_occurred_rounded_up() -> None:
    marks = percentiles(list(range(1, 1001)))

    assert (marks.p50, marks.p90, marks.p99, marks.p999) == (501, 901, 991, 1000)
    assert (marks.worst, marks.count) == (1000, 1000)


def test_one_slow_answer_among_few_is_the_tail() -> None:
    assert percentiles([1] * 9 + [100]).p99 == 100


def test_a_measurement_without_answers_is_none() -> None:
    with pytest.raises(ConfigurationError, match="no request was answered"):
        percentiles([])


def test_the_interval_of_a_mean_is_that_of_the_textbook_for_many_values() -> None:
    values = np.random.default_rng(1).normal(5.0, 2.0, size=(400, 3))

    low, high = interval_of_mean(values)

    half = 1.96 * values.std(axis=0) / 20
    np.testing.assert_allclose(low, values.mean(axis=0) - half, atol=0.1 * half.max())
    np.testing.assert_allclose(high, values.mean(axis=0) + half, atol=0.1 * half.max())
    np.testing.assert_array_equal(interval_of_mean(values)[0], low)


def test_the_interval_of_one_value_is_that_value() -> None:
    assert [float(each) for each in interval_of_mean([3.0])] == [3.0, 3.0]
