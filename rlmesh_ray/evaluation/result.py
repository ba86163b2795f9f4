"""Results of an evaluation: episodes, losses of endpoints, and their summary."""

import enum
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

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
        # Without a mask: one entry a lane.
        entries = value.reshape(-1) if isinstance(value, np.ndarray) else value
        value = entries[lane] if lane < len(entries) else None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    return None
