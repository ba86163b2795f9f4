"""Output of ``python -m benchmarks learning``."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cli.progress_view import BenchView
from benchmarks.learning.plan import THRESHOLDS, LearningPlan, Sampler, Task
from rlmesh_ray.cli.console import Console

if TYPE_CHECKING:
    from benchmarks.learning.measure import Comparison, Point


class LearningReport:
    """Tells how far the runs are.

    Args:
        console: Where.
        plan: What is learnt.
        out: Of the plot, which whole curves have.
    """

    def __init__(self, console: Console, plan: LearningPlan, out: Path) -> None:
        self._console = console
        self._plot = out if plan.is_whole_curve else None
        self._view = BenchView(console, "learning", asdict(plan))
        self._comparisons: list[Comparison] = []

    def note(self, task: Task, sampler: Sampler, seed: int, point: "Point") -> None:
        """Take one iteration of a run in, as soon as it is done."""
        self._console.event(
            "point", subject="learning", task=task, sampler=sampler, seed=seed, **asdict(point)
        )
        self._view.now(
            f"{task}, {sampler}, seed {seed}: mean return {point.return_mean:.4g} of "
            f"{THRESHOLDS[task].stop_return:g} after {point.env_steps:,} steps"
        )

    def follow(self, comparisons: "Iterable[Comparison]") -> int:
        """Show tasks as they are learnt, and the sum at the end; return the exit code.

        Args:
            comparisons: Learnt while they are iterated over.
        """
        from benchmarks.learning.report import caveats

        is_complete = self._view.follow(lambda: self._take(comparisons))
        found: dict[str, object] = {"tasks": [each.as_json() for each in self._comparisons]}
        if self._plot is not None and self._comparisons:
            from benchmarks.learning.plot import draw

            draw(self._comparisons, self._plot)
            self._console.say(f"plot: {self._plot}")
            found["plot"] = str(self._plot)
        return self._view.sum_up(
            is_complete=is_complete,
            caveats=caveats(self._comparisons),
            found=found,
        )

    def _take(self, comparisons: "Iterable[Comparison]") -> None:
        from benchmarks.learning.report import table

        for comparison in comparisons:
            self._comparisons.append(comparison)
            self._console.show(table(comparison))
