"""The table of what was learnt, and what to make of it."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from benchmarks.learning.measure import Comparison, Run
from benchmarks.learning.plan import THRESHOLDS, Sampler


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
            f"{run.decisive.env_steps:,}",
            str(run.decisive.iteration),
            f"{run.decisive.wall_s:,.0f}",
            f"{run.decisive.return_mean:.4g}",
            _mark(run),
        )
    return made


def caveats(comparisons: Sequence[Comparison]) -> list[str]:
    """Return what did not turn out as it should; each as a sentence."""
    return [
        f"{run.task} was not learnt by {run.sampler} with seed {run.seed}: mean return "
        f"{run.last.return_mean:.4g} after {run.last.env_steps:,} steps"
        for comparison in comparisons
        for run in comparison.runs
        if not run.is_learnt
    ]


def _verdict(comparison: Comparison) -> str:
    lines = []
    for sampler in comparison.samplers:
        line = f"{sampler}: {_steps(comparison, sampler)}"
        if sampler is not Sampler.RLLIB:
            ratio = comparison.steps_ratio(sampler)
            if comparison.is_same_curve(sampler):
                line += "; RLlib's own curve, to the last digit"
            elif ratio is not None:
                line += f"; {ratio:.2f} of RLlib's own"
        lines.append(line)
    return "\n".join(lines)


def _steps(comparison: Comparison, sampler: Sampler) -> str:
    runs = comparison.of(sampler)
    num_learnt = sum(run.is_learnt for run in runs)
    found = comparison.steps_to_threshold(sampler)
    if found is None:
        return "not learnt"
    mean, low, high = found
    text = f"{mean:,.0f} env steps to the threshold"
    if num_learnt > 1:
        text += f" in the mean, 95 % interval {low:,.0f} to {high:,.0f}"
    return text if num_learnt == len(runs) else f"{text}, {num_learnt} of {len(runs)} seeds only"


def _mark(run: Run) -> Text:
    return Text("✓", style="green") if run.is_learnt else Text("✗", style="red")
