"""``rlmesh-ray train``: trains an RLlib algorithm on endpoints."""

import functools
import glob
import json
import math
import os
import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmesh_ray.auth.token_file import client_token_of
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import RECORDING_LOG, said
from rlmesh_ray.cli.options.common import (
    ENVIRONMENT,
    OUTPUT,
    DebugFlag,
    EditionText,
    EnvKwargs,
    JsonFlag,
    ResetTimeout,
    TlsAuthority,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    TokenFile,
    client_tls,
    file_option,
    folder_option,
    parse_env_kwargs,
    read_token,
    search_current_folder,
    shown_options,
)
from rlmesh_ray.cli.options.hyperparameter_args import (
    edited_config,
    parse_settings,
    read_config_code,
    read_settings_file,
)
from rlmesh_ray.cli.options.recording import (
    RecordEveryOption,
    RecordMaxOption,
    RecordOption,
    RecordVideoOption,
    record_options,
)
from rlmesh_ray.cli.options.training_run import (
    TRAINING,
    CheckpointEveryOption,
    EvaluateEveryOption,
    KeepOption,
    ResumeOption,
    Tracker,
    TrackOption,
    claimed,
    resumed_run,
    write_run,
)
from rlmesh_ray.cli.signals import INTERRUPTED, interrupts_noted
from rlmesh_ray.cli.views.training_view import format_duration
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import DEFAULT_RESET_TIMEOUT_S
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

    from rlmesh_ray.client.channel import ClientTls
    from rlmesh_ray.recording.options import RecordOptions
    from rlmesh_ray.rllib.checkpoint_folder import TrainingProgress
    from rlmesh_ray.spaces.contract import EnvContract

_ALGO = "PPO"
_DEFAULT_ITERS = 100
_DEFAULT_LANES = 8
_CHECKPOINT, _BEST = "checkpoint", "checkpoint-best"
_CURVE, _PROGRESS = "learning_curve.png", "progress.csv"


EnvArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="ENV_OR_ADDRESS",
        help="A Gymnasium id or module:factory (endpoints are started on Ray), or a running "
        "endpoint.",
        show_default=False,
    ),
]
AlgoOption = Annotated[
    str | None,
    typer.Option(
        "--algo",
        metavar="NAME",
        rich_help_panel=TRAINING,
        help="An algorithm of RLlib: PPO, APPO, IMPALA, DQN or SAC.",
        show_default=_ALGO,
    ),
]
EndpointsOption = Annotated[
    int | None,
    typer.Option(
        "--num-endpoints",
        min=1,
        rich_help_panel=ENVIRONMENT,
        help="Endpoints to start, for an id or a factory.",
        show_default="one a runner",
    ),
]
LanesOption = Annotated[
    int | None,
    typer.Option(
        "--num-envs",
        min=1,
        rich_help_panel=ENVIRONMENT,
        help="Lanes of each session, for an id or a factory.",
        show_default=str(_DEFAULT_LANES),
    ),
]
ResetThreadsOption = Annotated[
    int | None,
    typer.Option(
        "--reset-threads",
        min=1,
        rich_help_panel=ENVIRONMENT,
        help="Lanes that reset at the same time.",
        show_default="1",
    ),
]
RunnersOption = Annotated[
    int | None,
    typer.Option(
        "--num-env-runners",
        min=0,
        rich_help_panel=TRAINING,
        help="EnvRunner actors of RLlib; 0: the driver samples.",
        show_default="0",
    ),
]
ReturnOption = Annotated[
    float | None,
    typer.Option(
        "--stop-return",
        metavar="RETURN",
        rich_help_panel=TRAINING,
        help="Stop at this mean return.",
    ),
]
ItersOption = Annotated[
    int | None,
    typer.Option(
        "--stop-iters",
        min=1,
        rich_help_panel=TRAINING,
        help="Stop after this many iterations, with those before --resume.",
        show_default=f"{_DEFAULT_ITERS}, without --stop-return",
    ),
]
FolderOption = Annotated[
    Path | None,
    folder_option(
        "--checkpoint-dir",
        OUTPUT,
        "Folder for checkpoint/, progress.csv and learning_curve.png.",
        show_default="runs/ENV-ALGO-TIME",
    ),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        metavar="SEED",
        rich_help_panel=TRAINING,
        help="Seed of everything that RLlib seeds; sessions then step together.",
    ),
]


SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        rich_help_panel=TRAINING,
        help="A hyperparameter of AlgorithmConfig.training(), such as lr=1e-4 or "
        "model_config.fcnet_hiddens=[64,64]; repeatable.",
    ),
]
ConfigOption = Annotated[
    Path | None,
    file_option(
        "--config",
        TRAINING,
        "Hyperparameters in YAML or JSON, or FILE.py with edit_config(config); --set overrides it.",
    ),
]


def train(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    env: EnvArgument = None,
    algo: AlgoOption = None,
    num_endpoints: EndpointsOption = None,
    num_envs: LanesOption = None,
    env_kwargs: EnvKwargs = None,
    reset_threads: ResetThreadsOption = None,
    reset_timeout: ResetTimeout = DEFAULT_RESET_TIMEOUT_S,
    num_env_runners: RunnersOption = None,
    stop_return: ReturnOption = None,
    stop_iters: ItersOption = None,
    resume: ResumeOption = None,
    seed: SeedOption = None,
    set_: SetOption = None,
    config: ConfigOption = None,
    evaluate_every: EvaluateEveryOption = None,
    token_file: TokenFile = None,
    tls_ca: TlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_from_ray: TlsFromRay = False,
    edition_text: EditionText = None,
    checkpoint_dir: FolderOption = None,
    checkpoint_every: CheckpointEveryOption = None,
    keep: KeepOption = None,
    track: TrackOption = None,
    record: RecordOption = None,
    record_max_gb: RecordMaxOption = 10.0,
    record_video: RecordVideoOption = "auto",
    record_every: RecordEveryOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Train on endpoints; write a checkpoint and a learning curve, also after Ctrl-C.

    Stops at the first goal. Joins a running Ray (RAY_ADDRESS, ray start), or starts its own.
    """
    code = config if config is not None and config.suffix == ".py" else None
    given = {
        "env": env,
        "algo": algo and algo.upper(),
        "num_endpoints": num_endpoints,
        "num_envs": num_envs,
        "env_kwargs": parse_env_kwargs(env_kwargs),
        "reset_threads": reset_threads,
        "num_env_runners": num_env_runners,
        "seed": seed,
        "settings": {**read_settings_file(None if code else config), **parse_settings(set_)},
        "config_code": code and read_config_code(code),
        "stop_return": stop_return,
        "stop_iters": stop_iters,
        "checkpoint_every": checkpoint_every,
        "keep": keep,
        "evaluate_every": evaluate_every,
        "track": track or None,
    }
    options, folder = _options_and_folder(given, checkpoint_dir, resume)
    search_current_folder(options["env"])
    source = read_token(token_file)
    tls = client_tls(tls_ca, tls_cert, tls_key, from_ray=tls_from_ray)
    # The token itself: runners may be on nodes without the file.
    token = None if source is None else client_token_of(source)
    job = _TrainOptions(
        **options,
        kept=options,
        folder=folder,
        is_resumed=resume is not None,
        config_file=code,
        token=token,
        tls=tls,
        edition_text=edition_text,
        reset_timeout_s=reset_timeout,
        record=record_options(record, record_max_gb, record_video, record_every),
        record_every=record_every or 10,
        connection=shown_options(
            token_file=token_file,
            tls_ca=tls_ca,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_from_ray=tls_from_ray,
            edition_text=edition_text,
        ),
    )
    return _run(context.obj, job)


def _options_and_folder(
    given: dict[str, Any], checkpoint_dir: Path | None, resume: Path | None
) -> tuple[dict[str, Any], Path]:
    """Return the options of a new training, or of one that goes on, and its folder.

    Raises:
        typer.BadParameter: An option is missing, or excludes another one.
        ConfigurationError: The folder holds another run, or none to go on with.
    """
    if resume is not None:
        if checkpoint_dir is not None:
            raise typer.BadParameter("a run goes on in its folder", param_hint="--checkpoint-dir")
        return resumed_run(resume, given), resume
    if given["env"] is None:
        raise typer.BadParameter("missing, without --resume", param_hint="ENV_OR_ADDRESS")
    options = {name: value for name, value in given.items() if value is not None}
    of_endpoints = ("num_endpoints", "num_envs", "env_kwargs", "reset_threads")
    own = [name for name in of_endpoints if name in options]
    if not looks_like_address(given["env"]):
        options.setdefault("num_envs", _DEFAULT_LANES)
    elif own:
        raise typer.BadParameter(
            "for a Gymnasium id or a factory only; a running endpoint has its own",
            param_hint=[f"--{name.replace('_', '-')}" for name in own],
        )
    if "stop_return" not in options:
        options.setdefault("stop_iters", _DEFAULT_ITERS)
    options = {"algo": _ALGO, "num_env_runners": 0, **options}
    folder = checkpoint_dir or _default_folder(options["env"], options["algo"])
    _require_new(folder)
    return options, folder


@dataclass(frozen=True, slots=True, kw_only=True)
class _TrainOptions:
    """Values of the command's options."""

    env: str
    algo: str
    num_endpoints: int | None = None
    num_envs: int | None = None
    env_kwargs: dict[str, object] | None = None
    reset_threads: int = 1
    num_env_runners: int
    seed: int | None = None
    settings: dict[str, object]
    """Hyperparameters."""
    config_code: str | None = None
    """Text of ``config_file``."""
    config_file: Path | None
    """The Python module of ``--config``."""
    stop_return: float | None = None
    stop_iters: int | None = None
    checkpoint_every: int | None = None
    keep: int = 1
    evaluate_every: int | None = None
    track: list[str] = field(default_factory=list)
    kept: dict[str, Any]
    """All of the above, as the folder keeps them."""
    folder: Path
    is_resumed: bool
    token: str | None
    tls: "ClientTls | None"
    edition_text: str | None
    reset_timeout_s: float
    record: "RecordOptions | None"
    record_every: int
    connection: str
    """The options with which another command connects to the same endpoint."""


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


def _run(console: Console, job: _TrainOptions) -> int:
    from rlmesh_ray.cli.local_ray import require_rllib

    require_rllib("train")
    with console.waiting(f"asking {job.env}"):
        _check_env(job)
    with claimed(job.folder):
        return _run_claimed(console, job)


def _run_claimed(console: Console, job: _TrainOptions) -> int:
    with console.waiting("loading Ray and RLlib"):
        from rlmesh_ray.cli.local_ray import connected_ray
        from rlmesh_ray.cli.views.training_view import TrainingView
        from rlmesh_ray.models.torch.threads import limit_torch_threads
        from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY
        from rlmesh_ray.rllib.training import (
            learning_curve,
            require_goal_ahead,
            saved_progress,
            tracked,
        )
        from rlmesh_ray.rllib.training import train as run

        limit_torch_threads(1)  # as train() does
        checkpoint = job.folder / _CHECKPOINT
        former = saved_progress(checkpoint) if job.is_resumed else []
        # What can be refused is refused before Ray starts, which takes long.
        require_goal_ahead(former, job.stop_return, job.stop_iters)
        config = _config(job)
    endpoints = 0 if looks_like_address(job.env) else job.num_endpoints or job.num_env_runners or 1
    num_cpus = endpoints + job.num_env_runners + 1
    with (
        connected_ray(console, num_cpus=num_cpus),
        said(RECORDING_LOG, functools.partial(console.say, style="yellow")),
    ):
        if endpoints:
            console.say(f"starting {endpoints} endpoint(s) of {job.env} …")
        _configure(config, job, num_done=len(former))
        _announce(console, config, job, num_done=len(former))
        write_run(job.folder, job.kept)
        with (
            TrainingView(console, job.stop_iters) as view,
            interrupts_noted(_report_interrupt) as is_interrupted,
        ):
            progress = run(
                config,
                stop_return=job.stop_return,
                stop_iters=job.stop_iters,
                checkpoint_dir=checkpoint,
                checkpoint_every=job.checkpoint_every,
                keep=job.keep,
                resume=checkpoint if job.is_resumed else None,
                is_interrupted=is_interrupted,
            )
            tensorboard = Tracker.TENSORBOARD in job.track
            progress = tracked(progress, job.folder, former=former, tensorboard=tensorboard)
            history = [*former, *view.follow(progress)]
        file, curve = job.folder / _CURVE, None
        title = f"{job.algo} on {config.env_config[PLAN_KEY].contract.id}, over endpoints"
        try:
            with console.waiting("drawing the learning curve"):
                learning_curve(history, file, title=title, goal=job.stop_return)
            curve = file
        except OSError as error:  # a full disk: the checkpoint is there
            console.say(f"{file} cannot be written: {error}", style="yellow")
        _show_result(console, job, history[-1], curve, is_interrupted=is_interrupted())
    return INTERRUPTED if is_interrupted() else 0


def _config(job: _TrainOptions) -> "AlgorithmConfig":
    """Return the algorithm's config, before the environment is known."""
    from rlmesh_ray.cli.log_setup import quiet_rllib
    from rlmesh_ray.rllib.config.hyperparameters import set_hyperparameters
    from rlmesh_ray.rllib.config.presets import algorithm_config

    config = algorithm_config(job.algo)
    quiet_rllib(config)
    if job.config_file is not None:
        config = edited_config(job.config_file, config)
    set_hyperparameters(config, job.settings)
    if job.evaluate_every is not None:
        config.evaluation(evaluation_interval=job.evaluate_every)
        if not config.evaluation_config:
            # With the training's seed each evaluation would play the same episodes.
            config.evaluation(evaluation_config={"explore": False, "seed": None})
    return config


def _check_env(job: _TrainOptions) -> None:
    """Dial an endpoint, or check the form of a name, before Ray starts, which takes long.

    Raises:
        RlmeshError: The endpoint or the name cannot be used.
    """
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.client.env_session_client import probe_endpoint
    from rlmesh_ray.envs.env_source import require_env_name
    from rlmesh_ray.spaces.contract import EnvContract

    if not looks_like_address(job.env):
        require_env_name(job.env)
        return
    connect_options = ConnectOptions(job.env, job.token, job.tls, edition_text=job.edition_text)
    contract = probe_endpoint(connect_options).contract
    if isinstance(contract, EnvContract):
        _require_one_agent(contract)


def _require_one_agent(contract: "EnvContract") -> None:
    from rlmesh_ray.client.remote_base import agents_notice

    if agents := agents_notice(contract):
        raise ConfigurationError(f"train trains one policy for one agent, and {agents}")


def _report_interrupt() -> None:
    # In a signal handler: the console may be in the middle of a line.
    os.write(
        sys.stderr.fileno(),
        b"\ninterrupted: the checkpoint is written after this iteration; once more ends at once\n",
    )


def _configure(config: "AlgorithmConfig", job: _TrainOptions, *, num_done: int) -> None:
    from rlmesh_ray.rllib.config.configure import configure
    from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY
    from rlmesh_ray.server.env_options import EnvOptions

    config.env_runners(num_env_runners=job.num_env_runners)
    # Another one each time, or it would begin with the same episodes again.
    config.debugging(seed=None if job.seed is None else job.seed + num_done)
    wanted = EnvOptions()
    if not looks_like_address(job.env):
        wanted = EnvOptions(env_kwargs=job.env_kwargs, reset_threads=job.reset_threads)
    if job.num_envs is not None:
        wanted["num_envs"] = job.num_envs
    configure(
        config,
        job.env,
        num_endpoints=job.num_endpoints,
        token=job.token,
        tls=job.tls,
        edition_text=job.edition_text,
        reset_timeout_s=job.reset_timeout_s,
        lockstep=job.seed is not None,  # a seed is given for a reproducible training
        **wanted,
    )
    _require_one_agent(config.env_config[PLAN_KEY].contract)
    if job.record is not None:
        from rlmesh_ray.recording.rllib_episodes import record_episodes

        record_episodes(config, job.record, every=job.record_every)


def _announce(
    console: Console, config: "AlgorithmConfig", job: _TrainOptions, *, num_done: int
) -> None:
    from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY

    plan = config.env_config[PLAN_KEY]
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
    job: _TrainOptions,
    last: "TrainingProgress",
    curve: Path | None,
    *,
    is_interrupted: bool,
) -> None:
    checkpoint, best = job.folder / _CHECKPOINT, job.folder / _BEST
    target = job.stop_return
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


def _resume_command(job: _TrainOptions) -> str:
    """Return the command that goes on with a training, with what its folder does not hold."""
    again = shown_options(
        config=job.config_file,
        reset_timeout=job.reset_timeout_s != DEFAULT_RESET_TIMEOUT_S and job.reset_timeout_s,
    )
    if record := job.record:
        again += shown_options(
            record=record.folder,
            record_video=record.video != "auto" and record.video,
            record_max_gb=record.max_gb != 10.0 and record.max_gb,
            record_every=job.record_every != 10 and job.record_every,
        )
    return f"train --resume {shlex.quote(str(job.folder))}{job.connection}{again}"


def _shown(job: _TrainOptions) -> str:
    """Return the options with which another command uses the same environment."""
    if looks_like_address(job.env):
        return job.connection
    return shown_options(env_kwargs=job.env_kwargs and json.dumps(job.env_kwargs))


def _default_folder(env: str, algo: str) -> Path:
    name = "endpoint" if looks_like_address(env) else env.replace("/", "-").replace(":", "-")
    return Path("runs") / f"{name}-{algo}-{time.strftime('%Y%m%d-%H%M%S')}"
