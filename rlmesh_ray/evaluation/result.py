"""Results of an evaluation: episodes, losses of endpoints, summary; comparison of policies."""

import enum
import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.spaces.vector_infos import lane_info

# Gymnasium-Robotics uses the first key, Meta-World and others the second.
_SUCCESS_KEYS = ("is_success", "success")
_FINAL_INFO = "final_info"


class EndpointRole(enum.StrEnum):
    """Role of an endpoint in an evaluation."""

    ENV = "env"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One finished episode. Comparisons ignore the addresses where it ran."""

    index: int
    seed: int | None
    episode_return: float
    length: int
    """Number of steps."""
    terminated: bool
    truncated: bool = False
    success: bool | None = None
    """``is_success`` or ``success`` of the episode's last info; None: it has neither, which
    ``EvaluationResult.success_rate`` counts as a failure if other episodes report."""
    endpoint: str = field(default="", compare=False)
    """Address of the environment."""
    model: str = field(default="", compare=False)
    """Address of the policy; empty for a function."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The failure of an endpoint, for a while or for good."""

    role: EndpointRole
    address: str
    """Its last known address; empty if its fleet never had one."""
    cause: str
    """The error, in one line."""
    episodes: tuple[int, ...]
    """Indices of the interrupted episodes, which run again from their start."""


@dataclass(frozen=True, slots=True)
class EndpointReport:
    """Counts of one endpoint."""

    role: EndpointRole
    address: str
    """An endpoint that was restarted elsewhere counts as two."""
    episodes: int
    """Number of episodes that were finished with it."""
    interruptions: int
    """How often it failed or hung while episodes ran."""


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The episodes of an evaluation, and statistics of their returns."""

    episodes: tuple[EpisodeResult, ...]
    """In the order of their indices; at least one."""
    wall_s: float
    endpoints: tuple[EndpointReport, ...] = ()
    """Environments first, then models; a function has no endpoint."""

    @property
    def returns(self) -> list[float]:
        """Return of each episode."""
        return [episode.episode_return for episode in self.episodes]

    @property
    def _are_finite(self) -> bool:
        return all(map(math.isfinite, self.returns))

    @property
    def lengths(self) -> list[int]:
        """Length of each episode in steps."""
        return [episode.length for episode in self.episodes]

    @property
    def return_mean(self) -> float:
        """Mean return; NaN or infinite if a return is."""
        if not self._are_finite:
            return sum(self.returns) / len(self.returns)
        return statistics.fmean(self.returns)

    @property
    def return_stderr(self) -> float:
        """Standard error of the mean return; NaN for one episode, or if a return is not finite."""
        if len(self.episodes) < 2 or not self._are_finite:
            return math.nan
        return statistics.stdev(self.returns) / math.sqrt(len(self.episodes))

    @property
    def return_min(self) -> float:
        """Lowest return."""
        return min(self.returns)

    @property
    def return_max(self) -> float:
        """Highest return."""
        return max(self.returns)

    @property
    def length_mean(self) -> float:
        """Mean length in steps."""
        return statistics.fmean(self.lengths)

    @property
    def success_rate(self) -> float | None:
        """Share of successes among all episodes; None if no episode reports any.

        An episode that reports neither success nor failure counts as a failure: many environments
        report nothing until the task is done. ``success_reports`` says how many report.
        """
        if not self.success_reports:
            return None
        return sum(episode.success is True for episode in self.episodes) / len(self.episodes)

    @property
    def success_reports(self) -> int:
        """How many episodes report success or failure."""
        return sum(episode.success is not None for episode in self.episodes)

    @property
    def env_steps(self) -> int:
        """Steps of all finished episodes together."""
        return sum(self.lengths)

    @property
    def interruptions(self) -> int:
        """How often an endpoint was lost while it was in use."""
        return sum(report.interruptions for report in self.endpoints)


def endpoint_reports(news: Iterable[EpisodeResult | Loss]) -> tuple[EndpointReport, ...]:
    """Count episodes and interruptions of each endpoint; environments come first."""
    counts: defaultdict[tuple[EndpointRole, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in news:
        if isinstance(each, Loss):
            counts[each.role, each.address][1] += bool(each.episodes)
            continue
        counts[EndpointRole.ENV, each.endpoint][0] += 1
        if each.model:
            counts[EndpointRole.MODEL, each.model][0] += 1
    return tuple(EndpointReport(*place, *count) for place, count in sorted(counts.items()))


def success_of(infos: Mapping[str, object], lane: int) -> bool | None:
    """Return whether the episode of ``lane`` ended with success; None: not reported.

    Args:
        infos: Infos of the vector step that ended the episode, in gymnasium's form. Under autoreset
            mode SAME_STEP the episode's own are in ``final_info``.
        lane: Index of the lane.
    """
    final = infos.get(_FINAL_INFO)
    if isinstance(final, Mapping):
        success = success_of(final, lane)
        if success is not None:
            return success
    for key in _SUCCESS_KEYS:
        if key in infos:
            own = {name: infos[name] for name in (key, f"_{key}") if name in infos}
            success = _as_flag(lane_info(own, lane).get(key), lane)
            if success is not None:
                return success
    return None


def _as_flag(value: object, lane: int) -> bool | None:
    """Return a flag, or 0 or 1 as a flag; None for any other value."""
    if isinstance(value, (list, tuple, np.ndarray)):
        # Without a mask: one entry per lane.
        entries = value.reshape(-1) if isinstance(value, np.ndarray) else value
        value = entries[lane] if lane < len(entries) else None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None


# --- comparison of two policies ---

# Student's t interval of the mean is wide where there are few episodes; that of a bootstrap, which
# resamples them, is too narrow there: of two episodes it holds the true mean in half of all cases.
# And the same episodes always give the same interval.
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
