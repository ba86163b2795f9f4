"""The curves of ``learning`` as a picture."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.learning.measure import Comparison, Run
from benchmarks.learning.plan import THRESHOLDS, Sampler
from benchmarks.statistics import interval_of_mean

_COLOURS = {
    Sampler.AUTO: "#cc79a7",
    Sampler.TORCH: "#0072b2",
    Sampler.COMPILED: "#d55e00",
    Sampler.RLLIB: "#7f7f7f",
}
"""The colours differ for everybody's eyes."""

Curve = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]


def mean_curve(runs: Sequence[Run]) -> Curve:
    """Return env steps, the mean return over the seeds, and the 95 % interval of that mean.

    Between the points of a run its return is taken as a straight line. The curve has the steps that
    all runs have: from when each has ended an episode, to the end of the shortest.
    """
    known = [[point for point in run.points if not np.isnan(point.return_mean)] for run in runs]
    if not all(known):
        return (np.empty(0),) * 4
    first = max(points[0].env_steps for points in known)
    last = min(points[-1].env_steps for points in known)
    all_steps = {point.env_steps for points in known for point in points}
    steps = np.array(sorted(each for each in all_steps if first <= each <= last), np.float64)
    returns = np.stack(
        [
            np.interp(steps, [p.env_steps for p in points], [p.return_mean for p in points])
            for points in known
        ]
    )
    return steps, returns.mean(axis=0), *interval_of_mean(returns)


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Draw mean returns by env steps into a PNG, a panel for each task.

    Args:
        comparisons: One or more.
        path: Of the PNG; its folder is made.
    """
    # Drawn without pyplot, which would keep global state and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(comparisons), 4.4), dpi=120, layout="constrained")
    panels = figure.subplots(1, len(comparisons), squeeze=False)[0]
    for axes, comparison in zip(panels, comparisons, strict=True):
        for sampler in comparison.samplers:
            steps, means, low, high = mean_curve(comparison.of(sampler))
            # RLlib's curve may be one of ours, to the last digit.
            style = "--" if sampler is Sampler.RLLIB else "-"
            axes.plot(steps, means, style, color=_COLOURS[sampler], label=sampler)
            axes.fill_between(steps, low, high, color=_COLOURS[sampler], alpha=0.2, linewidth=0)
        threshold = THRESHOLDS[comparison.task].stop_return
        axes.axhline(threshold, color="#7f7f7f", linestyle=":", linewidth=1)
        num_seeds = len(comparison.runs) // len(comparison.samplers)
        axes.set_title(f"{comparison.task}, {num_seeds} seeds; dotted: the threshold", fontsize=10)
        axes.set_xlabel("env steps")
        axes.ticklabel_format(axis="x", style="plain")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean episode return; bands: 95 % interval")
    lines, labels = panels[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels))
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path)
