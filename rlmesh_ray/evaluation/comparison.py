"""Comparison of two policies by their returns in the same episodes, with a 95 % interval.

The interval is Student's t interval of the mean. It is wide where there are few episodes; that of a
bootstrap, which resamples them, is too narrow there: of two episodes it holds the true mean in half
of all cases. And the same episodes always give the same one.
"""

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.result import EpisodeResult

_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
"""Of Student's t at 0.975, for 1 to 9 degrees of freedom."""


def t_quantile(degrees: int) -> float:
    """Return the quantile of Student's t at 0.975, within 0.0002."""
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    # Expansion around the normal distribution (Abramowitz and Stegun, 26.7.5).
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True, slots=True)
class MeanInterval:
    """A mean with its 95 % interval: NaN of one value, or if a value is not finite."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{_text(self.mean)}, no interval"
        return f"{_text(self.mean)}, 95 % interval {_text(self.low)} … {_text(self.high)}"


def _text(value: float) -> str:
    return f"{value:,.2f}" if value == 0 or abs(value) >= 1 else f"{value:.3g}"


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of ``values``, at least one, with its interval."""
    count = len(values)
    if count < 2 or not all(map(math.isfinite, values)):
        return MeanInterval(sum(values) / count, math.nan, math.nan)
    mean = statistics.fmean(values)
    half = t_quantile(count - 1) * statistics.stdev(values) / math.sqrt(count)
    return MeanInterval(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Two policies, A and B, in episodes of the same seeds."""

    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    """Return of B minus return of A, by seed."""
    difference: MeanInterval
    """The mean difference."""

    @property
    def contains_zero(self) -> bool | None:
        """Whether the interval contains 0; None: there is no interval."""
        low, high = self.difference.low, self.difference.high
        return None if math.isnan(low) else low <= 0 <= high

    @property
    def verdict(self) -> str:
        if self.contains_zero is None:
            return "there is no interval: run more episodes, with finite returns (--episodes)"
        if self.contains_zero:
            return "the interval contains 0: these episodes do not tell A and B apart"
        better = "B" if self.difference.mean > 0 else "A"
        return f"the interval does not contain 0: {better} has the higher returns"


def compare_episodes(a: Sequence[EpisodeResult], b: Sequence[EpisodeResult]) -> PairedComparison:
    """Compare the returns of two policies in pairs: A's and B's episodes of the same seed.

    Raises:
        ConfigurationError: They have no seed in common.
    """
    of_a = {each.seed: each.episode_return for each in a if each.seed is not None}
    of_b = {each.seed: each.episode_return for each in b if each.seed is not None}
    seeds = tuple(sorted(of_a.keys() & of_b.keys()))
    if not seeds:
        raise ConfigurationError(
            f"no episodes in common: A has {_described(of_a)}, B has {_described(of_b)}; evaluate "
            "both with the same seed (--seed)"
        )
    differences = tuple(of_b[seed] - of_a[seed] for seed in seeds)
    return PairedComparison(seeds, differences, mean_interval(differences))


def _described(seeds: Collection[int]) -> str:
    return f"seeds {min(seeds)} to {max(seeds)}" if seeds else "no seeds"
