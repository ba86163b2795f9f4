"""Statistics of repeated measurements: medians, quartiles, percentiles, ratios."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh_ray.errors import ConfigurationError

_RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Spread:
    """Several measurements of one thing."""

    values: tuple[float, ...]
    """In the order in which they were taken; none is left out."""
    cpu_us: tuple[float, ...] = ()
    """Of rates and round trips: processor time of one step or message in each of them, of clients,
    servers and all that they have started. Empty where it is not known."""
    server_cpu_us: tuple[float, ...] = ()
    """The servers' part of it."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ConfigurationError("nothing was measured; take at least one repetition")

    @property
    def median(self) -> float:
        """The middle one."""
        return self._quantile(0.5)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between these two lies the middle half."""
        return self._quantile(0.25), self._quantile(0.75)

    def _quantile(self, fraction: float) -> float:
        return float(np.quantile(self.values, fraction))

    def as_json(self) -> dict[str, object]:
        """Return it for a program: the summary, and every value."""
        low, high = self.quartiles
        summary = {"median": self.median, "quartiles": [low, high], "values": list(self.values)}
        costs = {"cpu_us": self.cpu_us, "server_cpu_us": self.server_cpu_us}
        return {**summary, **{name: Spread(each).as_json() for name, each in costs.items() if each}}


def ratio(ours: Spread, theirs: Spread) -> Spread:
    """Divide repetition by repetition: neighbours in time saw the same machine.

    Raises:
        ConfigurationError: The two were not repeated equally often.
    """
    if len(ours.values) != len(theirs.values):
        raise ConfigurationError(
            f"{len(ours.values)} repetitions cannot be compared with {len(theirs.values)}"
        )
    return Spread(tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True)))


def interval_of_mean(values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the bootstrap's 95 % interval of a mean, the same each time.

    Args:
        values: One row for each repetition, of any shape; the interval has the shape of a row.
    """
    rows = np.asarray(values, np.float64)
    drawn = np.random.default_rng(0).integers(len(rows), size=(_RESAMPLES, len(rows)))
    means = np.stack([rows[each].mean(axis=0) for each in drawn])
    low, high = np.quantile(means, [0.025, 0.975], axis=0)
    return low, high


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of durations, in microseconds."""

    p50: float
    p90: float
    p99: float
    p999: float
    worst: float
    count: int


def percentiles(durations_us: Sequence[int]) -> Percentiles:
    """Return the durations that 50, 90, 99 and 99.9 % of all do not exceed.

    A value between two measured ones is rounded up: nothing looks better than it was.

    Raises:
        ConfigurationError: There are no durations.
    """
    if not durations_us:
        raise ConfigurationError(
            "no request was answered in the time of the measurement; take more"
        )
    marks = np.quantile(durations_us, [0.5, 0.9, 0.99, 0.999, 1.0], method="higher")
    p50, p90, p99, p999, worst = (float(mark) for mark in marks)
    return Percentiles(p50, p90, p99, p999, worst, len(durations_us))
