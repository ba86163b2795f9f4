"""Progress of ``rlmesh-ray train``."""

import contextlib
import logging
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

from rich.status import Status

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import CLIENT_LOG, said

if TYPE_CHECKING:
    from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress

_BEGINNING = "building the algorithm, and running its first iteration"
_RECOVERY_LOG = "rlmesh_ray.rllib.runner.session_recovery"


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


class TrainingView:
    """Prints a line for each iteration; on a terminal also a live status line.

    Args:
        console: Output of the command.
        stop_iters: The iteration after which the run ends, for the time left; None: another goal.
    """

    def __init__(self, console: Console, stop_iters: int | None) -> None:
        self._console = console
        self._stop_iters = stop_iters
        self._sessions_lost = 0
        self._is_failure_shown = False
        self._num_warnings = 0
        self._status: Status | None = None
        self._open = contextlib.ExitStack()
        self._first = contextlib.ExitStack()
        """Open until the first iteration is over, without a status line."""
        if console.people.is_terminal:
            self._status = console.people.status(f"{_BEGINNING} …")

    def __enter__(self) -> Self:
        # The driver's own sessions log that their lanes take long to reset, and its own runner
        # that sessions fail: an iteration with either may take minutes.
        self._open.enter_context(said(CLIENT_LOG, self._say_progress, logging.INFO))
        self._open.enter_context(said(_RECOVERY_LOG, self._warn_of_failure))
        self._console.say(
            f"{'iteration':>9} {'env steps':>11} {'steps/s':>8} {'return':>9} {'elapsed':>12} "
            f"{'time left':>12}",
            style="dim",
        )
        if self._status is not None:
            self._status.start()
        else:
            self._first.enter_context(self._console.waiting(_BEGINNING))
        return self

    def __exit__(self, *_: object) -> None:
        self._first.close()
        self._open.close()
        if self._status is not None:
            self._status.stop()

    def _say_progress(self, text: str) -> None:
        self._console.say(text, style="dim")

    def _warn_of_failure(self, text: str) -> None:
        """Say the 1st, 2nd, 4th, 8th, … failure."""
        self._num_warnings += 1
        if not self._num_warnings & (self._num_warnings - 1):
            self._console.say(text, style="yellow")

    def follow(self, run: "Iterable[TrainingProgress]") -> "list[TrainingProgress]":
        """Show the progress of ``run``, and return all of it.

        A generator is closed before this returns or raises, also after Ctrl-C.
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
        self._first.close()
        left_s = None
        if self._stop_iters is not None:
            num_left = max(0, self._stop_iters - progress.iteration)
            left_s = num_left * progress.wall_s / progress.iteration
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
            evaluation_return_mean=progress.evaluation_return_mean,
        )
        mean = "-" if math.isnan(progress.return_mean) else f"{progress.return_mean:.1f}"
        self._console.say(
            f"{progress.iteration:>9} {progress.env_steps:>11,} {progress.env_steps_per_s:>8,.0f} "
            f"{mean:>9} {format_duration(progress.wall_s):>12} {format_duration(left_s):>12}"
        )
        if not math.isnan(progress.evaluation_return_mean):
            self._console.say(f"evaluated: mean return {progress.evaluation_return_mean:.1f}")
        if progress.first_failure and not self._is_failure_shown:
            self._is_failure_shown = True
            message = (
                f"{progress.first_failure}; episodes that this cuts short count as truncated, and "
                "are not in the mean return; only the first failure is shown: --debug shows all"
            )
            self._console.event("warning", message=message)
            if not self._num_warnings:
                self._console.say(message, style="yellow")
        if progress.sessions_lost > self._sessions_lost:
            self._sessions_lost = progress.sessions_lost
            self._console.say(
                f"{self._sessions_lost} session(s) lost so far; their episodes were cut short, "
                "and new ones begun; --debug shows the causes",
                style="yellow",
            )
        if self._status is not None:
            self._status.update(
                f"iteration {progress.iteration + 1} … return {mean}, "
                f"about {format_duration(left_s)} left"
            )
