"""Output of ``rlmesh-ray evaluate`` and ``compare``: progress and result."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlmesh_ray.cli.console import Console, SafeConsole, finite
from rlmesh_ray.cli.signals import interrupts_held
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointError,
    EvaluationInterruptedError,
    RlmeshError,
)

if TYPE_CHECKING:
    from rlmesh_ray.evaluation.result import EpisodeResult, EvaluationResult, Loss


def with_options_of(role: str, text: str) -> str:
    if role == "env":
        also = "--model-tls-ca is for the policy's endpoint alone"
        return text.replace("(without --tls-ca)", f"(without --tls-ca; {also})")
    text = text.replace("(without --tls-ca)", "(--tls-ca none)")
    return re.sub(r"--(?=tls-ca|token-file)", "--model-", text)


def name_options(error: EndpointError, models: Sequence[str]) -> None:
    """Have an error's message name the options for the endpoints that it is about.

    Args:
        error: Of an evaluation.
        models: Addresses of the model endpoints.
    """
    for cause in getattr(error, "causes", (error.message,)):
        address = error.address or cause.partition(": ")[0]
        role = "model" if address in models else "env"
        error.message = error.message.replace(cause, with_options_of(role, cause))


class EpisodesFile:
    """A new file with a line for each episode, and never a part of a line.

    Unbuffered: a killed run keeps its finished episodes, and closing does not write again what
    could not be written.

    Args:
        path: Path of the file, which must not exist yet.

    Raises:
        ConfigurationError: It exists or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("xb", buffering=0)
        except FileExistsError as error:
            problem = (
                "exists, and may hold episodes of an earlier run; name another file or remove it"
            )
            if not (path.is_file() or path.is_symlink()):
                problem = "is a folder or a device; name a file that does not exist yet"
            raise ConfigurationError(f"{path} {problem}") from error
        except OSError as error:
            raise ConfigurationError(
                f"cannot write {path}: {error.strerror or error}; name a file elsewhere"
            ) from error
        self._path = path
        self._size = 0
        self._num_episodes = 0

    def add(self, fields: Mapping[str, object]) -> None:
        """Write an episode.

        Raises:
            RlmeshError: The file can no longer be written.
        """
        line = json.dumps(finite({"event": "episode", **fields})).encode() + b"\n"
        rest = memoryview(line)
        try:
            while rest:  # a full disk takes a part first, and fails at the next write
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.seek(self._file.truncate(self._size))
            raise self._failure(error) from error
        self._size += len(line)
        self._num_episodes += 1

    def close(self) -> None:
        """Close the file, and remove it if it is empty and still has its name.

        Raises:
            RlmeshError: The disk is full, which some network disks report only now.
        """
        own = os.fstat(self._file.fileno())
        try:
            self._file.close()
        except OSError as error:
            raise self._failure(error) from error
        with contextlib.suppress(FileNotFoundError):
            if not own.st_size and os.path.samestat(self._path.stat(), own):
                self._path.unlink()

    def _failure(self, error: OSError) -> RlmeshError:
        return RlmeshError(
            f"cannot write {self._path}: {error.strerror or error}; it holds "
            f"{self._num_episodes} episodes; make room or lift the limit there, or name a file "
            "elsewhere, and evaluate again"
        )


class EvaluationView:
    """Shows episodes as they end, writes them to a file, and collects them.

    Args:
        console: Prints an event for each episode.
        num_episodes: Number of episodes of the evaluation.
        output: File for the episodes; None: none.
        finished: The list to collect them in; None: its own.
    """

    def __init__(
        self,
        console: Console,
        num_episodes: int,
        output: EpisodesFile | None,
        finished: "list[EpisodeResult] | None" = None,
    ) -> None:
        self._console = console
        self._num_episodes = num_episodes
        self._output = output
        self._episodes = [] if finished is None else finished
        self._losses: list[Loss] = []
        terminal = SafeConsole(is_stderr=True)
        self._bar = Progress(
            TextColumn("episodes"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}"),
            console=terminal,
            disable=not terminal.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("episodes", total=num_episodes, last="")
        self._shown = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._bar.disable:
            self._shown.enter_context(self._console.waiting(self._state))
        else:
            self._bar.start()
            self._shown.callback(self._bar.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self._shown.close()

    def _state(self) -> str:
        count = len(self._episodes)
        if count == self._num_episodes:
            return "closing the sessions, and writing what is recorded"
        return f"running episodes: {count} of {self._num_episodes} have ended"

    def advance(self, episode: "EpisodeResult") -> None:
        """Record, show and write a finished episode.

        Raises:
            RlmeshError: The episode could not be written.
            KeyboardInterrupt: An interrupt came meanwhile.
        """
        fields = asdict(episode)
        with interrupts_held():
            self._episodes.append(episode)
            self._bar.update(self._task, advance=1, last=f"return {episode.episode_return:g}")
            self._console.event("episode", **fields)
            if self._output is not None:
                self._output.add(fields)

    def note_loss(self, loss: "Loss") -> None:
        self._losses.append(loss)
        self._console.event("lost", **asdict(loss))
        again = f"; {len(loss.episodes)} episodes run again" if loss.episodes else ""
        cause = with_options_of(loss.role, loss.cause.removeprefix(f"{loss.address}: "))
        self._bar.console.print(
            f"lost {loss.role} {loss.address}: {cause}{again}",
            style="yellow",
            soft_wrap=True,
        )

    def so_far(self, error: BaseException) -> "EvaluationResult | None":
        """Return the result of an interrupted evaluation; None: no episode has finished.

        Args:
            error: The error that ended it. Its episodes are shown, if they were not yet.
        """
        from rlmesh_ray.evaluation.result import EvaluationResult, endpoint_reports

        if isinstance(error, EvaluationInterruptedError):
            shown = {episode.index for episode in self._episodes}
            for episode in error.episodes:
                if episode.index not in shown:
                    # The evaluation has failed already; another error must not cost the summary.
                    with contextlib.suppress(RlmeshError, KeyboardInterrupt):
                        self.advance(episode)
        if not self._episodes:
            return None
        in_order = tuple(sorted(self._episodes, key=lambda episode: episode.index))
        return EvaluationResult(in_order, 0.0, endpoint_reports([*self._episodes, *self._losses]))


def show_result(
    console: Console,
    result: "EvaluationResult",
    num_episodes: int,
    envs: list[str],
    models: list[str],
) -> None:
    """Show the result of an evaluation, also of an unfinished one.

    Args:
        console: Prints the event ``result``, or ``unfinished``.
        result: The result, with at least one episode.
        num_episodes: Number of episodes that were requested.
        envs: Addresses of the environment endpoints.
        models: Addresses of the model endpoints.
    """
    count = len(result.episodes)
    console.event(
        "result" if count == num_episodes else "unfinished",
        return_mean=result.return_mean,
        return_stderr=result.return_stderr,
        return_min=result.return_min,
        return_max=result.return_max,
        success_rate=result.success_rate,
        success_reports=result.success_reports,
        episodes=count,
        returns=result.returns,
        lengths=result.lengths,
        env_steps=result.env_steps,
        wall_s=result.wall_s,
        interruptions=result.interruptions,
        env=", ".join(envs),
        model=", ".join(models),
        endpoints=[asdict(report) for report in result.endpoints],
        # A program outside of the cluster must not need them; this shows whether it does.
        imported={name: name in sys.modules for name in ("ray", "torch")},
    )
    title = f"{count} episodes" if count == num_episodes else f"{count} of {num_episodes} episodes"
    console.facts(title, _facts(result, envs, models), [])


def _episodes(result: "EvaluationResult") -> str:
    count, reports = len(result.episodes), result.success_reports
    if reports == count:
        return f"{count} episodes"
    return f"{count} episodes; {count - reports} without a report count as failures"


def _facts(result: "EvaluationResult", envs: list[str], models: list[str]) -> dict[str, object]:
    spread = f" ± {result.return_stderr:.2f} (standard error)" if len(result.episodes) > 1 else ""
    facts: dict[str, Any] = {
        "mean return": f"{result.return_mean:.2f}{spread}",
        "range": f"{result.return_min:g} … {result.return_max:g}",
        "mean length": f"{result.length_mean:.1f} steps",
    }
    if result.success_rate is not None:
        facts["success rate"] = f"{100 * result.success_rate:.1f} % of {_episodes(result)}"
    if result.wall_s > 0:
        facts["time"] = f"{result.wall_s:.1f} s, {result.env_steps / result.wall_s:,.0f} steps/s"
    facts["environment"] = "\n".join(envs)
    facts["policy"] = "\n".join(models)
    if result.interruptions or len(envs) + len(models) > 2:
        facts["shares"] = "\n".join(
            f"{report.role} {report.address}: {report.episodes} episodes, "
            f"{report.interruptions} interruptions"
            for report in result.endpoints
        )
    return facts
