import math

import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.result import (
    EpisodeResult,
    compare_episodes,
    mean_interval,
    t_quantile,
)


def episodes(*returns: float, seed: int | None = 0) -> list[EpisodeResult]:
    return [
        EpisodeResult(index, None if seed is None else seed + index, each, 10, True)
        for index, each in enumerate(returns)
    ]


@pytest.mark.parametrize(
    ("degrees", "quantile"),
    [(1, 12.7062), (9, 2.2622), (10, 2.2281), (19, 2.0930), (30, 2.0423), (499, 1.9647)],
)
def test_the_quantiles_are_those_of_the_tables(degrees: int, quantile: float) -> None:
    assert t_quantile(degrees) == pytest.approx(quantile, abs=2e-4)


def test_the_interval_of_a_mean_is_student_s() -> None:
    interval = mean_interval([1.0, 2.0, 3.0, 4.0])

    half = 3.1824 * math.sqrt(5 / 3) / 2
    assert interval.mean == 2.5
    assert (interval.low, interval.high) == pytest.approx((2.5 - half, 2.5 + half))


@pytest.mark.parametrize("values", [[7.0], [7.0, math.nan], [7.0, math.inf]])
def test_where_there_is_no_interval_none_is_made_up(values: list[float]) -> None:
    interval = mean_interval(values)

    assert math.isnan(interval.low)
    assert str(interval).endswith("no interval")


def test_episodes_are_paired_by_seed_in_any_order() -> None:
    a = episodes(1.0, 2.0, 3.0)
    b = list(reversed(episodes(5.0, 7.0, 9.0, seed=1)))

    comparison = compare_episodes(a, b)

    assert comparison.seeds == (1, 2)
    assert comparison.differences == (3.0, 4.0)
    assert comparison.difference.mean == 3.5


@pytest.mark.parametrize(
    ("b", "words"),
    [
        ((3.0, 5.0, 4.0), "does not contain 0: B has the higher returns"),
        ((-3.0, -5.0, -4.0), "does not contain 0: A has the higher returns"),
        ((1.0, -1.0, 0.5), "contains 0: these episodes do not tell A and B apart"),
        ((0.0, 0.0, 0.0), "contains 0: these episodes do not tell A and B apart"),
        ((3.0,), "no interval: run more episodes"),
        ((3.0, math.nan), "with finite returns"),
    ],
)
def test_the_verdict_says_plainly_what_the_interval_shows(b: tuple[float, ...], words: str) -> None:
    assert words in compare_episodes(episodes(0.0, 0.0, 0.0), episodes(*b)).verdict


@pytest.mark.parametrize(
    ("seed", "words"), [(7, "A has seeds 0 to 2, B has seeds 7 to 8"), (None, "B has no seeds")]
)
def test_episodes_without_a_common_seed_cannot_be_compared(seed: int | None, words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"no episodes in common.*{words}.*--seed"):
        compare_episodes(episodes(0.0, 0.0, 0.0), episodes(1.0, 1.0, seed=seed))
