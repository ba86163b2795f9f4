"""The rates of ``scaling`` as a picture."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.findings import Finding
from benchmarks.scaling.listener import OURS
from benchmarks.scaling.plan import Part, Setup
from benchmarks.scaling.rates import EFFICIENCY, GOAL, IDEAL

_STYLES = (("#0072b2", "o"), ("#d55e00", "s"), ("#009e73", "^"), ("#cc79a7", "D"))
"""Colour and marker of each series; the colours differ for everybody's eyes."""


def draw(findings: Sequence[Finding], setups: Sequence[Setup], path: Path) -> None:
    """Draw rates and efficiencies into a PNG: medians, and the quartiles as bands.

    Args:
        findings: Those of other parts are left out.
        setups: What was measured.
        path: Of the PNG; its folder is made.
    """
    # Drawn without pyplot, which would keep global state and look for a screen.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import StrMethodFormatter

    by_case = {each.case: each for each in findings if each.workload == Part.RATES}
    series: dict[str, list[Setup]] = {}
    for setup in setups:
        series.setdefault(f"{setup.series}, {setup.transport}", []).append(setup)
    figure = Figure(figsize=(9.2, 4.2), dpi=120, layout="constrained")
    rates, efficiencies = figure.subplots(1, 2)
    for index, (label, members) in enumerate(series.items()):
        colour, marker = _STYLES[index % len(_STYLES)]
        xs = [setup.num_endpoints for setup in members]
        found = [by_case[setup.case] for setup in members]
        for axes, spreads in (
            (rates, [each.sides[OURS] for each in found]),
            (efficiencies, [each.comparisons[EFFICIENCY] for each in found]),
        ):
            medians = [spread.median for spread in spreads]
            axes.plot(xs, medians, label=label, color=colour, marker=marker, markersize=4)
            low, high = zip(*(spread.quartiles for spread in spreads), strict=True)
            axes.fill_between(xs, low, high, color=colour, alpha=0.2, linewidth=0)
        ideal = [each.sides[IDEAL].median for each in found]
        rates.plot(xs, ideal, color=colour, linestyle=":", linewidth=1)
    rates.set_title("sampled; dotted: that of one endpoint, times as many", fontsize=10)
    rates.set_ylabel("env steps a second")
    rates.set_yscale("log", base=2)
    rates.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    efficiencies.set_title("of the ideal", fontsize=10)
    efficiencies.axhline(GOAL.limit, color="#7f7f7f", linestyle="--", linewidth=1)
    efficiencies.set_ylim(bottom=0.0)
    ticks = sorted({setup.num_endpoints for setup in setups})
    for axes in (rates, efficiencies):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("endpoints")
        axes.grid(alpha=0.3)
    lines, labels = rates.get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path)
