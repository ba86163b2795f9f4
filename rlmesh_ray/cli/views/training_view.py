"""How a training run shows itself while it goes on."""

import contextlib
import math
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.status import Status

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.views.eta import IterationSample, StopCriteria, eta_s, format_duration

if TYPE_CHECKING:
    from rlmesh_ray.rllib.training import TrainingProgress


class TrainingView:
    """A line an iteration; on a terminal also one that lives between them.

    Args:
        console: Where to.
        goal: When the run will end.
    """

    def __init__(self, console: Console, goal: StopCriteria) -> None:
        self._console = console
        self._goal = goal
        self._samples: list[IterationSample] = []
        self._sessions_lost = 0
        self._is_failure_told = False
        self._status: Status | None = None
        if console.people.is_terminal:
            self._status = console.people.status("first iteration …")

    def __enter__(self) -> Self:
        self._console.say(
            f"{'iteration':>9} {'env steps':>11} {'steps/s':>8} {'return':>9} {'elapsed':>12} "
            f"{'time left':>12}",
            style="dim",
        )
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._status is not None:
            self._status.stop()

    def follow(self, run: "Iterable[TrainingProgress]") -> "list[TrainingProgress]":
        """Show ``run`` as it goes and return all of it.

        However this is left, by an error or Ctrl-C too, a generator is closed first.
        """
        history = []
        with contextlib.ExitStack() as stack:
            close = getattr(run, "close", None)
            if close is not None:
                stack.callback(close)
            for progress in run:
                history.append(progress)
                self.update(progress)
        return history

    def update(self, progress: "TrainingProgress") -> None:
        """Show where the run stands after an iteration."""
        self._samples.append(
            IterationSample(
                progress.iteration, progress.env_steps, progress.return_mean, progress.wall_s
            )
        )
        left_s = eta_s(self._samples, self._goal)
        self._console.event(
            "progress",
            iteration=progress.iteration,
            env_steps=progress.env_steps,
            env_steps_per_s=progress.env_steps_per_s,
            return_mean=progress.return_mean,
            episodes=progress.episodes,
            wall_s=progress.wall_s,
            time_left_s=left_s,
            sessions_lost=progress.sessions_lost,
        )
        mean = "-" if math.isnan(progress.return_mean) else f"{progress.return_mean:.1f}"
        self._console.say(
            f"{progress.iteration:>9} {progress.env_steps:>11,} {progress.env_steps_per_s:>8,.0f} "
            f"{mean:>9} {format_duration(progress.wall_s):>12} {format_duration(left_s):>12}"
        )
        if progress.first_failure and not self._is_failure_told:
            self._is_failure_told = True
            message = (
                f"{progress.first_failure}; episodes that this cuts short count as truncated, and "
                "are not in the mean return; more failures are not shown here: --debug shows all"
            )
            self._console.event("warning", message=message)
            self._console.say(message, style="yellow")
        if progress.sessions_lost > self._sessions_lost:
            self._sessions_lost = progress.sessions_lost
            self._console.say(
                f"{self._sessions_lost} session(s) lost so far; their episodes were cut short, "
                "and new ones begun; --debug tells why",
                style="yellow",
            )
        if self._status is not None:
            self._status.update(
                f"iteration {progress.iteration + 1} … return {mean}, "
                f"about {format_duration(left_s)} left"
            )
