"""The curves of ``growth`` as a picture."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from benchmarks.findings import Finding
from benchmarks.growth.measure import MEMORY, SYNC, TCP
from benchmarks.growth.plan import Axis, GrowthPlan, case
from rlmesh_ray.errors import ConfigurationError

_TITLES = {
    Axis.LANES: ("lanes, one endpoint", "lanes"),
    Axis.ENDPOINTS: ("endpoints of 8 lanes each", "endpoints"),
    Axis.OBSERVATION: ("size of observations, 8 lanes", "bytes a lane"),
}
_LINES = {
    MEMORY: ("rlmesh-ray, shared memory", "#0072b2", "o"),
    TCP: ("rlmesh-ray, TCP", "#d55e00", "s"),
    SYNC: ("SyncVectorEnv in the process", "#7f7f7f", "^"),
}
"""Label, colour and marker of each side; the colours differ for everybody's eyes."""


def require_matplotlib() -> None:
    """Refuse to measure for minutes what cannot be drawn.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError("the plot needs matplotlib: pip install matplotlib")


def draw(findings: Sequence[Finding], plan: GrowthPlan, path: Path) -> None:
    """Draw medians, and the quartiles as bands, into a PNG.

    Args:
        findings: Of all axes; axes that are missing are left out.
        plan: What was measured.
        path: Of the PNG; its folder is made.
    """
    # Drawn without pyplot, which would keep global state and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    by_axis = {
        axis: [each for each in findings if each.workload == axis]
        for axis in plan.axes
        if any(each.workload == axis for each in findings)
    }
    figure = Figure(figsize=(4.6 * len(by_axis), 4.2), dpi=120, layout="constrained")
    columns = figure.subplots(1, len(by_axis), squeeze=False, sharey=True)[0]
    for axes, (axis, found) in zip(columns, by_axis.items(), strict=True):
        points = {case(axis, point): point for point in plan.points(axis)}
        xs = [points[each.case] for each in found]
        for side, (label, colour, marker) in _LINES.items():
            spreads = [each.sides[side] for each in found]
            axes.plot(
                xs,
                [spread.median for spread in spreads],
                label=label,
                color=colour,
                marker=marker,
                markersize=4,
            )
            low, high = zip(*(spread.quartiles for spread in spreads), strict=True)
            axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        title, unit = _TITLES[axis]
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(xs, [_short(x) for x in xs])
        axes.minorticks_off()
        axes.set_xlabel(unit)
        axes.grid(alpha=0.3)
    columns[0].set_ylabel("one vector step, microseconds")
    lines, labels = columns[0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=1 if len(by_axis) == 1 else 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path)


def _short(number: int) -> str:
    for factor, letter in ((2**20, "M"), (2**10, "k")):
        if number >= factor and number % factor == 0:
            return f"{number // factor}{letter}"
    return str(number)
