"""``rlmesh-ray train``: trains an RLlib algorithm on endpoints."""

import contextlib
import functools
import glob
import json
import logging
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer
from rich.status import Status

import rlmesh_ray
from rlmesh_ray.auth.token_file import client_token_of
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import connected_ray, require_rllib
from rlmesh_ray.cli.log_setup import CLIENT_LOG, RECORDING_LOG, quiet_rllib, said
from rlmesh_ray.cli.options.common import (
    OUTPUT,
    ConnectionFlags,
    MadeEnvFlags,
    RecordingFlags,
    file_flag,
    flag,
    folder_flag,
    same_flag,
    search_current_folder,
    shown_options,
)
from rlmesh_ray.cli.options.training_run import (
    DEFAULT_ALGO,
    DEFAULT_ITERS,
    DEFAULT_LANES,
    TRAINING,
    TrainingRun,
    claimed,
    edited_config,
    parse_settings,
    read_config_code,
    read_settings_file,
    resumed_run,
    write_run,
)
from rlmesh_ray.cli.signals import INTERRUPTED, interrupts_noted
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.evaluation.options import EvaluationOptions
from rlmesh_ray.models.torch.threads import limit_torch_threads
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.server.env.env_options import EnvOptions

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
    from rlmesh_ray.rllib.config.rollout_plan import RolloutPlan

_CHECKPOINT, _BEST = "checkpoint", "checkpoint-best"
_CURVE, _PROGRESS = "learning_curve.png", "progress.csv"


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


@dataclass(frozen=True)
class CommandFlags:
    """What the run's folder does not keep, or in another form."""

    set_: list[str] | None = flag(
        TRAINING,
        "A hyperparameter of AlgorithmConfig.training(), such as lr=1e-4 or "
        "model_config.fcnet_hiddens=[64,64]; repeatable.",
        metavar="NAME=VALUE",
    )
    config: Path | None = file_flag(
        TRAINING,
        "Hyperparameters in YAML or JSON, or FILE.py with edit_config(config); --set overrides it.",
    )
    resume: Path | None = folder_flag(
        TRAINING, "Go on with the run in this folder, as it was configured."
    )
    checkpoint_dir: Path | None = folder_flag(
        OUTPUT,
        "Folder for checkpoint/, progress.csv and learning_curve.png.",
        show_default="runs/ENV-ALGO-TIME",
    )
    reset_timeout_s: float = same_flag(EvaluationOptions, "reset_timeout_s")


@dataclass(frozen=True)
class RunnerRecordingFlags(RecordingFlags):
    """Which of the runners' episodes are recorded."""

    record_every: int | None = flag(
        OUTPUT,
        "Record each Nth episode of a runner; those of evaluation, all.",
        min=1,
        metavar="N",
        show_default="10",
    )


def train(
    console: Console,
    *,
    env: Annotated[
        str | None,
        typer.Argument(
            metavar="ENV_OR_ADDRESS",
            help="A Gymnasium id or module:factory (endpoints are started on Ray), or a running "
            "endpoint.",
            show_default=False,
        ),
    ] = None,
    run: TrainingRun,
    made: MadeEnvFlags,
    flags: CommandFlags,
    connection: ConnectionFlags,
    recording: RunnerRecordingFlags,
) -> int:
    """Train on endpoints; write a checkpoint and a learning curve, also after Ctrl-C.

    Stops at the first goal. Joins a running Ray (RAY_ADDRESS, ray start), or starts its own.
    """
    config = flags.config
    code = config if config is not None and config.suffix == ".py" else None
    given = replace(
        run,
        env=env,
        algo=run.algo and run.algo.upper(),
        env_kwargs=made.kwargs(),
        settings={**read_settings_file(None if code else config), **parse_settings(flags.set_)},
        config_code=None if code is None else read_config_code(code),
        track=run.track or None,
    )
    run, folder = _run_and_folder(given, flags.checkpoint_dir, flags.resume)
    assert run.env is not None, "a run is of an environment"
    search_current_folder(run.env)
    endpoint = connection.to(run.env)
    if endpoint.token is not None:
        # The token itself: runners may be on nodes without the file.
        endpoint = replace(endpoint, token=client_token_of(endpoint.token))
    recorded = recording.options()
    job = _Job(run, folder, flags, code, endpoint, connection.shown, recording, recorded)
    require_rllib("train")
    with console.waiting(f"asking {job.env}"):
        _check_env(job)
    with claimed(folder):
        return _run(console, job)


def _run_and_folder(
    given: TrainingRun, checkpoint_dir: Path | None, resume: Path | None
) -> tuple[TrainingRun, Path]:
    """Return a new training, or one that goes on, and its folder.

    Raises:
        typer.BadParameter: An option is missing, or excludes another one.
        ConfigurationError: The folder holds another run, or none to go on with.
    """
    if resume is not None:
        if checkpoint_dir is not None:
            raise typer.BadParameter("a run goes on in its folder", param_hint="--checkpoint-dir")
        return resumed_run(resume, given), resume
    if given.env is None:
        raise typer.BadParameter("missing, without --resume", param_hint="ENV_OR_ADDRESS")
    run = replace(
        given, algo=given.algo or DEFAULT_ALGO, num_env_runners=given.num_env_runners or 0
    )
    of_endpoints = ("num_endpoints", "num_envs", "env_kwargs", "reset_threads")
    if not looks_like_address(given.env):
        run = replace(run, num_envs=run.num_envs or DEFAULT_LANES)
    elif own := [name for name in of_endpoints if name in given.options]:
        raise typer.BadParameter(
            "for a Gymnasium id or a factory only; a running endpoint has its own",
            param_hint=[f"--{name.replace('_', '-')}" for name in own],
        )
    if run.stop_return is None and run.stop_iters is None:
        run = replace(run, stop_iters=DEFAULT_ITERS)
    folder = checkpoint_dir or _default_folder(given.env, run.algo or "")
    _require_new(folder)
    return run, folder


@dataclass(frozen=True)
class _Job:
    """A training, as this command runs it."""

    run: TrainingRun
    folder: Path
    flags: CommandFlags
    config_file: Path | None
    """The Python module of ``--config``."""
    endpoint: "rlmesh_ray.ConnectOptions"
    """Of the environment, if it is at an endpoint that runs."""
    connection: str
    """The options with which another command connects to the same endpoint."""
    recording: RunnerRecordingFlags
    recorded: "RecordOptions | None"

    @property
    def env(self) -> str:
        return self.endpoint.address

    @property
    def algo(self) -> str:
        return self.run.algo or DEFAULT_ALGO

    @property
    def num_env_runners(self) -> int:
        return self.run.num_env_runners or 0


def _require_new(folder: Path) -> None:
    """Refuse a folder in which files of another run would be overwritten.

    Raises:
        ConfigurationError: The folder has such files.
    """
    # Unlike Path.exists() it does not fail where it may not look.
    names = (_CHECKPOINT, _CURVE, _PROGRESS)
    found = [name for name in names if os.path.exists(folder / name)]
    found += sorted(glob.glob(f"{_CHECKPOINT}-*", root_dir=folder))
    if found:
        has_checkpoint = bool({*found} - {_CURVE, _PROGRESS, _BEST})
        go_on = f", or go on with it: --resume {folder}" if has_checkpoint else ""
        raise ConfigurationError(
            f"{folder} holds another run already ({', '.join(found)}); name another "
            f"--checkpoint-dir, or move that run away{go_on}"
        )


def _run(console: Console, job: _Job) -> int:
    with console.waiting("loading Ray and RLlib"):
        from rlmesh_ray.rllib.training import (
            learning_curve,
            require_goal_ahead,
            saved_progress,
            tracked,
        )
        from rlmesh_ray.rllib.training import train as run

        limit_torch_threads(1)  # as train() does
        checkpoint = job.folder / _CHECKPOINT
        former = saved_progress(checkpoint) if job.flags.resume else []
        # What can be refused is refused before Ray starts, which takes long.
        require_goal_ahead(former, job.run.stop_return, job.run.stop_iters)
        config = _config(job)
    endpoints = (
        0 if looks_like_address(job.env) else job.run.num_endpoints or job.num_env_runners or 1
    )
    num_cpus = endpoints + job.num_env_runners + 1
    with (
        connected_ray(console, num_cpus=num_cpus),
        said(RECORDING_LOG, functools.partial(console.say, style="yellow")),
    ):
        if endpoints:
            console.say(f"starting {endpoints} endpoint(s) of {job.env} …")
        plan = _configure(config, job, num_done=len(former))
        _announce(console, plan, job, num_done=len(former))
        write_run(job.folder, job.run)
        with (
            TrainingView(console, job.run.stop_iters) as view,
            interrupts_noted(_report_interrupt) as is_interrupted,
        ):
            progress = run(
                config,
                stop_return=job.run.stop_return,
                stop_iters=job.run.stop_iters,
                checkpoint_dir=checkpoint,
                checkpoint_every=job.run.checkpoint_every,
                keep=job.run.keep or 1,
                resume=checkpoint if job.flags.resume else None,
                is_interrupted=is_interrupted,
            )
            tensorboard = "tensorboard" in (job.run.track or ())
            progress = tracked(progress, job.folder, former=former, tensorboard=tensorboard)
            history = [*former, *view.follow(progress)]
        file, curve = job.folder / _CURVE, None
        title = f"{job.algo} on {plan.contract.id}, over endpoints"
        try:
            with console.waiting("drawing the learning curve"):
                learning_curve(history, file, title=title, goal=job.run.stop_return)
            curve = file
        except OSError as error:  # a full disk: the checkpoint is there
            console.say(f"{file} cannot be written: {error}", style="yellow")
        _show_result(console, job, history[-1], curve, is_interrupted=is_interrupted())
    return INTERRUPTED if is_interrupted() else 0


def _config(job: _Job) -> "AlgorithmConfig":
    """Return the algorithm's config, before the environment is known."""
    from rlmesh_ray.rllib.config.hyperparameters import algorithm_config, set_hyperparameters

    config = algorithm_config(job.algo)
    quiet_rllib(config)
    if job.config_file is not None:
        config = edited_config(job.config_file, config)
    set_hyperparameters(config, job.run.settings or {})
    if job.run.evaluate_every is not None:
        config.evaluation(evaluation_interval=job.run.evaluate_every)
        if not config.evaluation_config:
            # With the training's seed each evaluation would play the same episodes.
            config.evaluation(evaluation_config={"explore": False, "seed": None})
    return config


def _check_env(job: _Job) -> None:
    """Dial an endpoint, or check the form of a name, before Ray starts, which takes long.

    Raises:
        RlmeshError: The endpoint or the name cannot be used.
    """
    from rlmesh_ray.client.env.env_session_client import probe_endpoint
    from rlmesh_ray.envs.env_source import require_env_name

    if not looks_like_address(job.env):
        require_env_name(job.env)
        return
    contract = probe_endpoint(job.endpoint).contract
    if isinstance(contract, rlmesh_ray.EnvContract):
        _require_one_agent(contract)


def _require_one_agent(contract: "rlmesh_ray.EnvContract") -> None:
    from rlmesh_ray.client.env.remote_env import agents_notice

    if agents := agents_notice(contract):
        raise ConfigurationError(f"train trains one policy for one agent, and {agents}")


def _report_interrupt() -> None:
    # In a signal handler: the console may be in the middle of a line.
    os.write(
        sys.stderr.fileno(),
        b"\ninterrupted: the checkpoint is written after this iteration; once more ends at once\n",
    )


def _configure(config: "AlgorithmConfig", job: _Job, *, num_done: int) -> "RolloutPlan":
    from rlmesh_ray.rllib.config.configure import configure
    from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY

    config.env_runners(num_env_runners=job.num_env_runners)
    # Another one each time, or it would begin with the same episodes again.
    config.debugging(seed=None if job.run.seed is None else job.run.seed + num_done)
    wanted = EnvOptions()
    if not looks_like_address(job.env):
        wanted = EnvOptions(env_kwargs=job.run.env_kwargs, reset_threads=job.run.reset_threads or 1)
    if job.run.num_envs is not None:
        wanted["num_envs"] = job.run.num_envs
    configure(
        config,
        job.env,
        num_endpoints=job.run.num_endpoints,
        token=job.endpoint.token,
        tls=job.endpoint.tls,
        edition_text=job.endpoint.edition_text,
        reset_timeout_s=job.flags.reset_timeout_s,
        lockstep=job.run.seed is not None,  # a seed is given for a reproducible training
        **wanted,
    )
    plan: RolloutPlan = config.env_config[PLAN_KEY]
    _require_one_agent(plan.contract)
    if job.recorded is not None:
        from rlmesh_ray.recording.rllib_episodes import record_episodes

        record_episodes(config, job.recorded, every=job.recording.record_every or 10)
    return plan


def _announce(console: Console, plan: "RolloutPlan", job: _Job, *, num_done: int) -> None:
    addresses = [plan.resolver.address(index) for index in range(len(plan.resolver))]
    console.event(
        "training",
        algo=job.algo,
        env=plan.contract.id,
        endpoints=addresses,
        num_envs=plan.contract.num_envs,
        num_env_runners=job.num_env_runners,
        folder=job.folder,
        iterations_before=num_done,
    )
    if num_done:
        console.say(f"goes on after iteration {num_done} of the run in {job.folder}")
    runners = f"{job.num_env_runners} EnvRunners" if job.num_env_runners else "the driver"
    console.say(
        f"{job.algo} on {plan.contract.id}: {runners} sampling from {', '.join(addresses)}, "
        f"{plan.contract.num_envs} lanes a session"
    )


def _show_result(
    console: Console,
    job: _Job,
    last: "TrainingProgress",
    curve: Path | None,
    *,
    is_interrupted: bool,
) -> None:
    checkpoint, best = job.folder / _CHECKPOINT, job.folder / _BEST
    target = job.run.stop_return
    is_reached = target is None or last.return_mean >= target
    console.event(
        "result",
        return_mean=last.return_mean,
        reached=is_reached,
        iterations=last.iteration,
        env_steps=last.env_steps,
        episodes=last.episodes,
        wall_s=last.wall_s,
        sessions_lost=last.sessions_lost,
        interrupted=is_interrupted,
        checkpoint=checkpoint,
        learning_curve=curve,
        best_checkpoint=best if best.exists() else None,
    )
    title = "trained" if is_reached else "stopped before the return was reached"
    console.facts(
        "interrupted; what was trained so far is kept" if is_interrupted else title,
        {
            "mean return": "none: no episode has ended"
            if math.isnan(last.return_mean)
            else f"{last.return_mean:.1f}",
            "env steps": f"{last.env_steps:,} in {last.iteration} iterations",
            "time": format_duration(last.wall_s),
            "checkpoint": checkpoint,
            **({"best checkpoint": best} if best.exists() else {}),
            **({"learning curve": curve} if curve is not None else {}),
        },
        [
            *([_resume_command(job)] if is_interrupted else []),
            f"evaluate --env {job.env}{_shown(job)} --model {checkpoint} --episodes 20",
            f"serve-model {checkpoint}",
        ],
    )


def _resume_command(job: _Job) -> str:
    """Return the command that goes on with a training, with what its folder does not hold."""
    again = shown_options(
        config=job.config_file,
        reset_timeout=job.flags.reset_timeout_s != CommandFlags.reset_timeout_s
        and job.flags.reset_timeout_s,
        **job.recording.given,
    )
    return f"train --resume {shlex.quote(str(job.folder))}{job.connection}{again}"


def _shown(job: _Job) -> str:
    if looks_like_address(job.env):
        return job.connection
    return shown_options(env_kwargs=job.run.env_kwargs and json.dumps(job.run.env_kwargs))


def _default_folder(env: str, algo: str) -> Path:
    name = "endpoint" if looks_like_address(env) else env.replace("/", "-").replace(":", "-")
    return Path("runs") / f"{name}-{algo}-{time.strftime('%Y%m%d-%H%M%S')}"
