"""Estimate of the time left of a training run."""

from collections.abc import Sequence
from dataclasses import dataclass

_WINDOW = 10


@dataclass(frozen=True, slots=True)
class IterationSample:
    """Progress of a run after one iteration."""

    iteration: int
    env_steps: int
    return_mean: float
    """NaN before the first episode has ended."""
    wall_s: float


@dataclass(frozen=True, slots=True)
class StopCriteria:
    """Goals of a run, which ends at the first one; None: no such goal."""

    stop_return: float | None = None
    stop_iters: int | None = None


def eta_s(samples: Sequence[IterationSample], goal: StopCriteria) -> float | None:
    """Estimate the seconds left; None where the samples do not allow it.

    The return is extrapolated by a straight line through the last ten samples, which needs at least
    three and a rise.

    Args:
        samples: One for each iteration, the oldest first.
        goal: Goals of the run.
    """
    if not samples:
        return None
    last = samples[-1]
    estimates = []
    if goal.stop_iters is not None and last.iteration > 0:
        left = goal.stop_iters - last.iteration
        estimates.append(max(0.0, left * last.wall_s / last.iteration))
    if goal.stop_return is not None:
        rise = _rise_per_s(samples[-_WINDOW:])
        if rise is not None and rise > 0:
            estimates.append(max(0.0, (goal.stop_return - last.return_mean) / rise))
    return min(estimates, default=None)


def format_duration(seconds: float | None) -> str:
    """Return ``seconds`` as text: ``"45 s"``, ``"2 min 05 s"``, ``"1 h 10 min"``."""
    if seconds is None:
        return "?"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _rise_per_s(samples: Sequence[IterationSample]) -> float | None:
    """Return the slope of the return over time, by least squares."""
    known = [sample for sample in samples if sample.return_mean == sample.return_mean]
    if len(known) < 3:
        return None
    mean_s = sum(sample.wall_s for sample in known) / len(known)
    mean_return = sum(sample.return_mean for sample in known) / len(known)
    spread = sum((sample.wall_s - mean_s) ** 2 for sample in known)
    if spread == 0:
        return None
    together = sum(
        (sample.wall_s - mean_s) * (sample.return_mean - mean_return) for sample in known
    )
    return together / spread
