"""train() runs an algorithm until a goal is reached; tracked() writes its progress into files."""

import csv
import logging
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    EVALUATION_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_finite
from rlmesh_ray.rllib.checkpoint_folder import (
    CheckpointFolder,
    TrainingProgress,
    newest_checkpoint,
    related_checkpoints,
    restore,
)
from rlmesh_ray.rllib.runner.session_recovery import NUM_EPISODES_INTERRUPTED_LIFETIME

_LOG = logging.getLogger(__name__)
_COLUMNS = [field.name for field in fields(TrainingProgress) if field.name != "first_failure"]
_ASK_TIMEOUT_S = 10.0
_BEGINNING = TrainingProgress(0, 0, math.nan, math.nan, 0, 0.0, 0)


def train(
    config: AlgorithmConfig,
    *,
    stop_return: float | None = None,
    stop_iters: int | None = None,
    stop_timesteps: int | None = None,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every: int | None = None,
    keep: int = 1,
    resume: str | Path | None = None,
    torch_threads: int = 1,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> Iterator[TrainingProgress]:
    """Train until the first goal is reached; yield after each iteration.

    The algorithm is stopped when the iterator ends or is closed. A checkpoint is written when a
    goal has been reached, or ``is_interrupted`` has returned True, before the last progress is
    yielded.

    With ``checkpoint_every``, or where the config evaluates, the best checkpoint is kept, too, with
    ``-best`` behind the name of ``checkpoint_dir``: that of the highest return of an evaluation,
    or, where the config does not evaluate, of the highest mean return.

    Args:
        config: Any AlgorithmConfig, whether it samples from endpoints or not.
        stop_return: Goal: mean return.
        stop_iters: Goal: number of iterations, with those before ``resume``.
        stop_timesteps: Goal: number of sampled env steps, with those before ``resume``.
        checkpoint_dir: Folder for the algorithm's checkpoint, new or empty, or that of ``resume``;
            None: no checkpoint. A checkpoint takes the place of the former one when it is complete.
        checkpoint_every: Also write a checkpoint after every so many iterations.
        keep: How many of the newest checkpoints to keep. Former ones have their iteration behind
            the name, such as ``checkpoint-000010``.
        resume: A checkpoint that ``train`` has written: go on with its weights, optimizers,
            connectors, counters and progress, in a config of the same algorithm and spaces; also
            with the coefficients that RLlib leaves out of checkpoints (SAC's alpha, that of the KL
            loss of PPO and APPO, MARWIL's mean of advantages). Episodes begin anew, and replay
            buffers are empty.
        torch_threads: Number of torch's threads in this process, which has the local learner and
            runner. More than one pays only for large networks: a small one was 40 times slower with
            two threads than with one, on two busy cores.
        is_interrupted: Called after each iteration; True ends the training as a goal does, with a
            checkpoint.

    Raises:
        ConfigurationError: No goal was given, or one that is not finite, or ``resume`` has reached
            it or is no such checkpoint, or ``checkpoint_dir`` has contents.
    """
    goals = (stop_return, stop_iters, stop_timesteps)
    source: Path | None = None
    history: list[TrainingProgress] = []
    if resume is not None:
        source, history = newest_checkpoint(Path(resume))
    require_goal_ahead(history, *goals)
    last = history[-1] if history else _BEGINNING
    checkpoints = None
    if checkpoint_dir is not None:
        _require_unused(Path(checkpoint_dir), resume)
        checkpoints = CheckpointFolder(
            Path(checkpoint_dir),
            every=checkpoint_every,
            keep=keep,
            is_evaluated=bool(config.evaluation_interval),
        )
    former_threads = torch.get_num_threads()
    torch.set_num_threads(torch_threads)
    algorithm = config.build_algo()
    returns = _RecentReturns(last.return_mean, last.episodes)
    try:
        if source is not None:
            restore(algorithm, source, last.env_steps)
        start_s = time.perf_counter() - last.wall_s
        is_done = False
        while not is_done:
            result = algorithm.train()
            if (last.iteration + 1) % (config.evaluation_interval or math.inf):
                result.pop(EVALUATION_RESULTS, None)  # RLlib repeats the latest ones
            last = _progress(
                result,
                returns,
                last,
                time.perf_counter() - start_s,
                last.first_failure or _first_failure(algorithm, result),
            )
            history.append(last)
            is_done = _is_reached(last, goals) or is_interrupted()
            if checkpoints is not None and checkpoints.save(algorithm, history, is_done=is_done):
                is_done = is_done or is_interrupted()  # while it was written
            yield last
    finally:
        algorithm.stop()
        torch.set_num_threads(former_threads)


def tracked(
    run: Iterator[TrainingProgress],
    folder: str | Path,
    *,
    former: Sequence[TrainingProgress] = (),
    tensorboard: bool = False,
) -> Iterator[TrainingProgress]:
    """Write the progress of a training into files, and yield it.

    ``progress.csv`` has a row for each iteration, ``nan`` where a number is not known. Files are
    flushed before the progress is yielded. ``run`` is closed when this ends or is closed. What
    cannot be written, as on a full disk, is logged once; the training goes on without it.

    Args:
        run: What ``train`` returned.
        folder: Folder of the files.
        former: For a training that goes on: its progress up to the checkpoint, from
            ``saved_progress``. Rows of iterations that run again are replaced.
        tensorboard: Also write TensorBoard's event files, over env steps.
    """
    with ExitStack() as stack:
        if isinstance(run, Generator):
            stack.callback(run.close)
        kinds: list[type[_CsvWriter | _EventWriter]] = [_CsvWriter]
        if tensorboard:
            kinds.append(_EventWriter)
        writers: dict[type[_CsvWriter | _EventWriter], _CsvWriter | _EventWriter] = {}
        for progress in run:
            for kind in kinds:
                try:
                    if kind not in writers:  # a training that fails before leaves no file
                        writers[kind] = kind(folder, former)
                        stack.callback(_close, writers[kind])
                    writers[kind].write(progress)
                except OSError as error:
                    kinds = [each for each in kinds if each is not kind]
                    _LOG.warning("%s is not written any more: %s", kind.files, error)
            yield progress


def saved_progress(checkpoint: str | Path) -> list[TrainingProgress]:
    """Return the progress after each iteration up to a checkpoint that ``train`` has written.

    Raises:
        ConfigurationError: It is no such checkpoint.
    """
    return newest_checkpoint(Path(checkpoint))[1]


def require_goal_ahead(
    former: Sequence[TrainingProgress],
    stop_return: float | None,
    stop_iters: int | None,
    stop_timesteps: int | None = None,
) -> None:
    """Require a goal that a training can reach and has not reached.

    Args:
        former: The progress after each iteration so far.
        stop_return: See ``train``.
        stop_iters: See ``train``.
        stop_timesteps: See ``train``.

    Raises:
        ConfigurationError: There is none, or one that is not finite, or one that was reached.
    """
    goals = {"stop_return": stop_return, "stop_iters": stop_iters, "stop_timesteps": stop_timesteps}
    given = {name: goal for name, goal in goals.items() if goal is not None}
    if not given:
        raise ConfigurationError("give a goal: stop_return, stop_iters or stop_timesteps")
    for name, goal in given.items():
        require_finite(name, goal)
    if former and _is_reached(former[-1], tuple(goals.values())):
        last = former[-1]
        raise ConfigurationError(
            f"the training has reached its goal: it had {last.iteration} iterations, "
            f"{last.env_steps} env steps and a mean return of {last.return_mean:.1f}; give a "
            "later goal to go on with it (--stop-iters, --stop-return; stop_iters=)"
        )


def _is_reached(last: TrainingProgress, goals: tuple[float | None, ...]) -> bool:
    figures = (last.return_mean, last.iteration, last.env_steps)
    return any(goal is not None and at >= goal for at, goal in zip(figures, goals, strict=True))


def _require_unused(folder: Path, resume: str | Path | None) -> None:
    if resume is not None and Path(resume).resolve() == folder.resolve():
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigurationError(
            f"{folder} has contents, which a checkpoint would replace; name a folder that is new "
            "or empty"
        )
    others = related_checkpoints(folder)
    if others and (resume is None or Path(resume).resolve() not in others):
        raise ConfigurationError(
            f"{', '.join(each.name for each in others)} beside {folder} are of another training, "
            "and would be replaced; move them away, or name another folder"
        )


def learning_curve(
    progress: Sequence[TrainingProgress], path: str | Path, *, title: str, goal: float | None = None
) -> None:
    """Draw mean return over env steps into a PNG file.

    Args:
        progress: At least one point.
        path: Path of the PNG; its folder must exist.
        title: Title of the figure.
        goal: A return to mark; None: no mark.
    """
    # Without pyplot, which has global state and needs a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [point.env_steps for point in progress],
        [point.return_mean for point in progress],
        marker="o",
        markersize=3,
        label="mean return",
    )
    if goal is not None:
        axes.axhline(goal, linestyle="--", color="gray", linewidth=1, label=f"goal: {goal:g}")
    axes.set_title(title)
    axes.set_xlabel("env steps")
    axes.set_ylabel("mean episode return")
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.ticklabel_format(axis="x", style="plain")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    Path(path).unlink(missing_ok=True)
    with Path(path).open("xb") as file:  # no link or pipe that another user has put there
        FigureCanvasAgg(figure).print_png(file)


class _RecentReturns:
    """The mean return over the latest iterations that together hold enough episodes.

    Args:
        former: The mean return to go on from; NaN: there is none.
        num_former: Episodes that have ended before.
    """

    _ENOUGH = 32

    def __init__(self, former: float = math.nan, num_former: int = 0) -> None:
        self._iterations: deque[tuple[int, float]] = deque()
        if not math.isnan(former):
            self.add(min(self._ENOUGH, num_former), former)

    def add(self, num_episodes: int, return_mean: float) -> float:
        """Add an iteration; return the mean, NaN as long as no episode has ended."""
        if num_episodes > 0:
            self._iterations.append((num_episodes, return_mean))
        total = sum(count for count, _ in self._iterations)
        while self._iterations and total - self._iterations[0][0] >= self._ENOUGH:
            total -= self._iterations.popleft()[0]
        if not total:
            return math.nan
        return sum(count * mean for count, mean in self._iterations) / total


def _first_failure(algorithm: Any, result: dict[str, Any]) -> str:
    """Return the first failure that truncated episodes of a runner; empty: none has."""
    if not result.get(ENV_RUNNER_RESULTS, {}).get(NUM_EPISODES_INTERRUPTED_LIFETIME):
        return ""
    causes = algorithm.env_runner_group.foreach_env_runner(
        lambda runner: getattr(runner, "first_failure", ""),  # RLlib's own runners have none
        healthy_only=True,
        timeout_seconds=_ASK_TIMEOUT_S,
    )
    return next(filter(None, causes), "")


def _progress(
    result: dict[str, Any],
    returns: _RecentReturns,
    last: TrainingProgress,
    wall_s: float,
    first_failure: str,
) -> TrainingProgress:
    runners = result.get(ENV_RUNNER_RESULTS, {})
    episodes = int(runners.get(NUM_EPISODES_LIFETIME, last.episodes))
    env_steps = int(runners.get(NUM_ENV_STEPS_SAMPLED_LIFETIME, last.env_steps))
    return TrainingProgress(
        iteration=last.iteration + 1,
        env_steps=env_steps,
        env_steps_per_s=(env_steps - last.env_steps) / max(wall_s - last.wall_s, 1e-9),
        return_mean=returns.add(
            episodes - last.episodes, float(runners.get(EPISODE_RETURN_MEAN, math.nan))
        ),
        episodes=episodes,
        wall_s=wall_s,
        sessions_lost=int(runners.get(NUM_ENV_STEP_FAILURES_LIFETIME, last.sessions_lost)),
        first_failure=first_failure,
        evaluation_return_mean=float(
            result.get(EVALUATION_RESULTS, {})
            .get(ENV_RUNNER_RESULTS, {})
            .get(EPISODE_RETURN_MEAN, math.nan)
        ),
    )


def _close(writer: "_CsvWriter | _EventWriter") -> None:
    with suppress(OSError):  # what it still holds finds no room, either
        writer.close()


class _CsvWriter:
    files = "progress.csv"

    def __init__(self, folder: str | Path, former: Sequence[TrainingProgress]) -> None:
        partial = Path(folder, "progress.csv.partial")
        partial.unlink(missing_ok=True)
        self._file = partial.open("x", newline="")  # what another user has put there stays as it is
        self._rows = csv.DictWriter(
            self._file, _COLUMNS, extrasaction="ignore", lineterminator="\n"
        )
        self._rows.writeheader()
        for progress in former:
            self.write(progress)
        partial.rename(partial.with_suffix(""))
        self.close = self._file.close

    def write(self, progress: TrainingProgress) -> None:
        self._rows.writerow(asdict(progress))
        self._file.flush()


class _EventWriter:
    files = "TensorBoard's event file"

    def __init__(self, folder: str | Path, former: Sequence[TrainingProgress]) -> None:
        # Its SummaryWriter writes in a thread, which dies of a full disk; the training would then
        # wait for that thread for ever.
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}"
        self._events = RecordWriter(str(Path(folder, name)))
        self.close = self._events.close
        self._add(file_version="brain.Event:2")
        if former:  # TensorBoard drops what an earlier process wrote of later steps
            start = SessionLog(status=SessionLog.START)
            self._add(step=former[-1].env_steps + 1, session_log=start)

    def write(self, progress: TrainingProgress) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=getattr(progress, name))
            for name in _COLUMNS
            if name != "env_steps" and not math.isnan(getattr(progress, name))
        ]
        self._add(step=progress.env_steps, summary=self._summary(value=values))
        self._events.flush()

    def _add(self, **content: object) -> None:
        self._events.write(self._event(wall_time=time.time(), **content).SerializeToString())
