"""The table of what was learnt, and what to make of it."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.learning.measure import Comparison, Run
from benchmarks.learning.plan import THRESHOLDS


def table(comparison: Comparison) -> Table:
    """Return the runs of a task, and how they compare."""
    threshold = THRESHOLDS[comparison.task]
    made = Table(
        title=f"{comparison.task}, to a mean return of {threshold.stop_return:g}",
        title_justify="left",
        title_style="bold",
        caption=_verdict(comparison),
        caption_justify="left",
    )
    made.add_column("")
    for name in ("seed", "env steps", "iterations", "seconds", "mean return"):
        made.add_column(name, justify="right")
    made.add_column("learnt")
    for run in comparison.runs:
        made.add_row(
            run.sampler,
            str(run.seed),
            f"{run.last.env_steps:,}",
            str(run.last.iteration),
            f"{run.last.wall_s:,.0f}",
            f"{run.last.return_mean:.3g}",
            _mark(run),
        )
    return made


def caveats(comparisons: Sequence[Comparison]) -> list[str]:
    """Return what did not turn out as it should; each as a sentence."""
    return [
        f"{run.task} was not learnt by {run.sampler} with seed {run.seed}: mean return "
        f"{run.last.return_mean:.3g} after {run.last.env_steps:,} steps"
        for comparison in comparisons
        for run in comparison.runs
        if not run.is_learnt
    ]


def _verdict(comparison: Comparison) -> str:
    if comparison.is_same_curve:
        return "the same curve, to the last digit"
    ratio = comparison.steps_ratio
    return "" if ratio is None else f"steps through endpoints / RLlib's own: {ratio:.2f}"


def _mark(run: Run) -> Text:
    return Text("✓", style="green") if run.is_learnt else Text("✗", style="red")
