"""Plots of evaluations: returns and lengths by seed and by endpoint, of one policy or of two.

The colours are those of Okabe and Ito, which people with any kind of colour vision tell apart; the
markers differ, too.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.evaluation.result import EpisodeResult, PairedComparison, mean_interval

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_MARKERS = "o^sDvP"
_LONGEST_NAME, _LETTERS_A_LINE = 48, 110

_Group = tuple[str, Sequence[EpisodeResult], float]
"""A name, episodes, and what to add to their places: equal values would hide each other."""
_Series = tuple[str, Sequence[float], Sequence[float]]
"""A name, places of episodes, and a value of each."""
_Row = tuple[str, list[_Series]]
"""The label of the values."""


def plot_evaluation(episodes: Sequence[EpisodeResult], path: Path, name: str) -> None:
    """Draw returns and lengths of a policy into a PNG file, by seed and by endpoint.

    Raises:
        RlmeshError: The file cannot be written.
    """
    places = sorted({each.endpoint for each in episodes})
    groups: list[_Group] = [
        (place, [each for each in episodes if each.endpoint == place], 0.0) for place in places
    ]
    if len(places) > len(_COLOURS):
        groups = [(f"{len(places)} endpoints", episodes, 0.0)]
    mean = mean_interval([each.episode_return for each in episodes])
    _draw(
        f"{_short(name)}\nmean return {mean}, episodes: {len(episodes)}",
        "number of the episode" if episodes[0].seed is None else "seed of the episode",
        _rows(groups),
        path,
    )


def plot_comparison(
    comparison: PairedComparison,
    a: Sequence[EpisodeResult],
    b: Sequence[EpisodeResult],
    path: Path,
    names: tuple[str, str],
) -> None:
    """Draw returns and lengths of the policies A and B, and the differences, into a PNG file.

    Raises:
        RlmeshError: The file cannot be written.
    """
    rows = _rows([(f"A: {_short(names[0])}", a, -0.15), (f"B: {_short(names[1])}", b, 0.15)])
    rows.append(("return of B - return of A", [("", comparison.seeds, comparison.differences)]))
    title = f"B - A: mean return {comparison.difference}, pairs: {len(comparison.seeds)}"
    _draw(f"{title}\n{comparison.verdict}", "seed of the episode", rows, path)


def _rows(groups: list[_Group]) -> list[_Row]:
    labels = {"episode_return": "return (sum of rewards)", "length": "length (steps)"}
    return [(label, [_series(*each, field) for each in groups]) for field, label in labels.items()]


def _series(name: str, episodes: Sequence[EpisodeResult], shift: float, field: str) -> _Series:
    xs = [(each.index if each.seed is None else each.seed) + shift for each in episodes]
    values = [float(getattr(each, field)) for each in episodes]
    # Those that are not finite are not drawn.
    return name, xs, [each if math.isfinite(each) else math.nan for each in values]


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST_NAME else f"…{name[1 - _LONGEST_NAME :]}"


def _draw(title: str, x_label: str, rows: list[_Row], path: Path) -> None:
    # Without pyplot, which has global state and needs a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 1.2 + 2.6 * len(rows)), dpi=120, layout="constrained")
    figure.suptitle(title, fontsize=11)
    widest = max(len(series) for _, series in rows)
    panels: Any = figure.subplots(
        len(rows), 2, sharex="col", sharey="row", width_ratios=(4, 1), squeeze=False
    )
    for (left, right), (label, series) in zip(panels, rows, strict=True):
        first = (widest - len(series)) / 2
        _draw_row(left, right, series, first, first_style=0 if series[0][0] else 2)
        left.set_ylabel(label)
    bottom, legend = panels[-1][0], panels[0][0].get_legend_handles_labels()
    bottom.set_xlabel(x_label)
    bottom.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    low, high = bottom.get_xlim()
    bottom.set_xlim(low - 0.5, high + 0.5)
    bottom.ticklabel_format(axis="x", style="plain", useOffset=False)
    panels[0][1].set_title("mean, 95 % interval", fontsize=9)
    panels[0][1].set_xticks([])
    panels[0][1].set_xlim(-0.8, widest - 0.2)
    columns = max(1, _LETTERS_A_LINE // (max(map(len, legend[1]), default=1) + 6))
    figure.legend(*legend, loc="outside lower center", ncols=columns, fontsize=9)
    canvas: Any = FigureCanvasAgg(figure)  # has no types
    try:
        canvas.print_png(str(path))
    except OSError as error:
        raise RlmeshError(f"cannot write {path}: {error.strerror or error}") from error


def _draw_row(left: Any, right: Any, series: list[_Series], first: float, first_style: int) -> None:
    most = max(len(values) for _, _, values in series)
    size = 30 if most <= 50 else 14 if most <= 200 else 6
    for position, (name, xs, values) in enumerate(series):
        colour, marker = _COLOURS[first_style + position], _MARKERS[first_style + position]
        style = {"marker": marker, "alpha": 0.75, "linewidths": 0}
        left.scatter(xs, values, size, colour, label=name, **style)
        known = [value for value in values if not math.isnan(value)]
        if known:
            mean = mean_interval(known)
            half = None if math.isnan(mean.low) else mean.mean - mean.low
            left.axhline(mean.mean, color=colour, linewidth=1, linestyle="--")
            style = {"color": colour, "marker": marker, "markersize": 5, "capsize": 8}
            right.errorbar(first + position, mean.mean, half, **style)
    for axes in (left, right):
        axes.grid(alpha=0.3, axis="y")
        if first_style:  # differences
            axes.axhline(0.0, color="black", linewidth=0.8)
