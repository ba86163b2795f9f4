"""``rlmesh-ray evaluate``: the returns of a policy in an environment."""

import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Unpack

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import rlmesh_ray
from rlmesh_ray.cli.console import Console, SafeConsole, finite
from rlmesh_ray.cli.log_setup import CLIENT_LOG, RECORDING_LOG, muted, said
from rlmesh_ray.cli.options.common import (
    CONNECTION,
    ENVIRONMENT,
    EPISODES,
    OUTPUT,
    POLICY,
    SECURITY,
    ConnectionFlags,
    MadeEnvFlags,
    RecordingFlags,
    client_tls,
    file_flag,
    flag,
    inference_flag,
    map_flag,
    parse_map,
    plot_flag,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.signals import interrupts_held
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ContractMismatchError,
    EndpointError,
    EvaluationInterruptedError,
    RlmeshError,
)
from rlmesh_ray.evaluation.options import RecordedEvaluationOptions, checked_seed
from rlmesh_ray.options import INFERENCES
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from rlmesh_ray.evaluation.result import EpisodeResult, EvaluationResult, Loss

MOST_LANES = 8
_NO_TLS = "none"
_OWN_MESSAGE_BYTES = 2**28
"""Largest message of a policy that this command serves itself: environments may be wide."""


EnvOption = Annotated[
    list[str],
    typer.Option(
        "--env",
        metavar="ENV_OR_ADDRESS",
        rich_help_panel=ENVIRONMENT,
        help="A Gymnasium id or module:factory, or an endpoint; repeatable.",
    ),
]
EpisodesOption = Annotated[
    int,
    typer.Option("--episodes", min=1, rich_help_panel=EPISODES, help="How many episodes."),
]


def _size(text: str | None) -> tuple[int, int] | None:
    """Return the height and width in ``text``.

    Raises:
        typer.BadParameter: It has none.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no height and width, such as 224x224")
    return int(found[1]), int(found[2])


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
        cause = loss.cause.removeprefix(f"{loss.address}: ")
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


@dataclass(frozen=True)
class EvaluateFlags(MadeEnvFlags):
    """What is served here, how to connect to policies elsewhere, and files for the results."""

    num_envs: int | None = flag(
        ENVIRONMENT,
        "Lanes of each session, for an id or a factory.",
        min=1,
        show_default="at most 8",
    )
    resize: str | None = flag(
        ENVIRONMENT,
        "Have images travel in this size, such as 224x224.",
        callback=_size,
        metavar="HEIGHTxWIDTH",
    )
    inference: Literal[INFERENCES] = inference_flag()  # type: ignore[valid-type]
    map: list[str] | None = map_flag()
    model_token_file: Path | None = file_flag(
        SECURITY, "Token of the model's endpoint, if it is another one."
    )
    model_tls_ca: str | None = flag(
        SECURITY,
        "--tls-ca of the model's endpoint, if it is another one; "
        f"{_NO_TLS}: that endpoint uses no TLS.",
        metavar="FILE",
    )
    model_edition_text: str | None = flag(
        CONNECTION, "--edition-text of the model's endpoint.", metavar="NAME_OR_SHA256"
    )
    output: Path | None = flag(
        OUTPUT,
        "A new file for the episodes: one JSON object a line, written as each ends.",
        metavar="FILE.jsonl",
    )
    plot: Path | None = plot_flag()

    def to(self, connection: ConnectionFlags) -> "rlmesh_ray.ConnectOptions":
        of_env = connection.to("")
        token, tls = of_env.token, of_env.tls
        if self.model_token_file is not None:
            token = read_token(self.model_token_file)
        if self.model_tls_ca == _NO_TLS:
            tls = None
        elif self.model_tls_ca is not None:
            tls = client_tls(Path(self.model_tls_ca), connection.tls_cert, connection.tls_key)
        return replace(of_env, token=token, tls=tls, edition_text=self.model_edition_text)


def evaluate(
    console: Console,
    *,
    env: EnvOption,
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            metavar="CHECKPOINT_OR_ADDRESS",
            rich_help_panel=POLICY,
            help="What serve-model takes, such as random, or an endpoint; repeatable.",
        ),
    ],
    episodes: EpisodesOption = 20,
    connection: ConnectionFlags,
    flags: EvaluateFlags,
    recording: RecordingFlags,
    **options: Unpack[RecordedEvaluationOptions],
) -> None:
    """Run episodes at all endpoints at once and summarize the returns.

    An id or a checkpoint is served while the command runs. An endpoint that dies costs no finished
    episode: the other endpoints go on, and the command dials it again.
    """
    checked_seed(episodes, options["seed"])
    _require_addresses(env, connection.edition_text, "--edition-text")
    _require_addresses(model, flags.model_edition_text, "--model-edition-text")
    kwargs = flags.kwargs(env)
    served_map, options["observation_map"] = maps_for(flags.map, model)
    to_env, to_model = connection.to(""), flags.to(connection)
    options["resize"] = flags.resize  # type: ignore[typeddict-item]  # ``_size`` has read it
    options["record"] = recording.options()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_options_named())
        file = None if flags.output is None else EpisodesFile(flags.output)
        if file is not None:
            stack.callback(file.close)
        lanes = flags.num_envs or min(math.ceil(episodes / len(env)), MOST_LANES)
        with console.waiting("starting the environment"):
            envs = [
                stack.enter_context(served_env(replace(to_env, address=name), lanes, kwargs))
                for name in env
            ]
            check_endpoints(envs, flags.num_envs)
        with console.waiting("loading the policy"):
            models = [
                stack.enter_context(
                    served_model(replace(to_model, address=name), flags.inference, served_map)
                )
                for name in model
            ]
        finished: list[EpisodeResult] = []
        try:
            run_and_show(console, envs, models, episodes, file, finished, **options)
        except BaseException:  # also after Ctrl-C: the finished episodes may have taken hours
            with contextlib.suppress(RlmeshError):  # the error is the first one
                _draw(console, finished, flags.plot, model)
            raise
        _draw(console, finished, flags.plot, model)


@contextlib.contextmanager
def _options_named() -> Iterator[None]:
    """Have an error about a token or TLS name the options that the policy's endpoint has alone."""
    try:
        yield
    except EndpointError as error:
        if "--tls-ca" in error.message or "--token-file" in error.message:
            error.message += (
                "; for the policy's endpoint: --model-token-file, --model-tls-ca (none: no TLS)"
            )
        raise


def _draw(
    console: Console, finished: "list[EpisodeResult]", plot: Path | None, model: list[str]
) -> None:
    if plot is not None and finished:
        from rlmesh_ray.evaluation.plot import plot_evaluation

        plot_evaluation(finished, plot, ", ".join(model))
        console.say(f"plot: {plot}")


def run_and_show(
    console: Console,
    envs: "list[rlmesh_ray.ConnectOptions]",
    models: "list[rlmesh_ray.ConnectOptions]",
    episodes: int,
    file: EpisodesFile | None = None,
    finished: "list[EpisodeResult] | None" = None,
    **options: Any,
) -> None:
    """Run episodes, show them as they end, then their summary; also of those before an error.

    Each is added to ``finished``; ``options`` are further arguments of ``evaluation.evaluate``.
    """
    from rlmesh_ray.evaluation.run import evaluate as run

    addresses = [each.address for each in envs], [each.address for each in models]
    meter = EvaluationView(console, episodes, file, finished)
    options |= {"on_episode": meter.advance, "on_loss": meter.note_loss}
    try:
        with (
            said(CLIENT_LOG, functools.partial(console.say, style="dim"), logging.INFO),
            said(RECORDING_LOG, functools.partial(console.say, style="yellow")),
            meter,
        ):
            result = run(envs, models, episodes=episodes, **options)
    except BaseException as error:  # also Ctrl-C: the finished episodes may have taken hours
        seen = meter.so_far(error)
        if seen is not None:
            show_result(console, seen, episodes, *addresses)
        raise
    show_result(console, result, episodes, *addresses)


def _require_addresses(names: list[str], edition_text: str | None, option: str) -> None:
    """Refuse an edition text where one of ``names`` is no endpoint.

    Raises:
        typer.BadParameter: The option would be ignored.
    """
    for name in names:
        if edition_text is not None and not looks_like_address(name):
            raise typer.BadParameter(
                f"it is for endpoints, and {name} is none; leave it out", param_hint=option
            )


def maps_for(
    texts: list[str] | None, models: list[str]
) -> "tuple[rlmesh_ray.ObservationMap | None, rlmesh_ray.ObservationMap | None]":
    """Return the map of policies that this command serves, and that of routes to endpoints.

    A policy that is served here maps by itself, as its own space completes the map.
    """
    mapping = parse_map(texts)
    is_remote = any(looks_like_address(name) for name in models)
    return (None, mapping) if is_remote else (mapping, None)


def check_endpoints(
    endpoints: "list[rlmesh_ray.ConnectOptions]", num_envs: int | None
) -> "list[rlmesh_ray.ConnectOptions]":
    """Check what endpoints serve, before a policy is loaded or a session is opened.

    Returns:
        Those that can be reached.

    Raises:
        ContractMismatchError: An endpoint serves another environment than the first one, or its
            sessions have another width than ``num_envs``.
        EndpointError: None of them can be reached, or one requires another token.
    """
    from rlmesh_ray.client.env.env_session_client import probe_endpoint
    from rlmesh_ray.evaluation.coordinator import require_same_environment

    unreachable: list[EndpointError] = []
    reached: list[rlmesh_ray.ConnectOptions] = []
    first: tuple[str, rlmesh_ray.EnvContract] | None = None
    for connect_options in endpoints:
        address = connect_options.address
        try:
            contract = probe_endpoint(connect_options).contract
        except AccessDeniedError:
            raise
        except EndpointError as error:
            unreachable.append(error)
            continue
        width = getattr(contract, "num_envs", None)
        if num_envs not in (None, width):
            raise ContractMismatchError(
                f"{address} serves {width} lanes a session, not {num_envs}; leave --num-envs out"
            )
        reached.append(connect_options)
        if isinstance(contract, rlmesh_ray.EnvContract):
            first = first or (address, contract)
            require_same_environment(address, contract, *first)
    if not reached:
        raise unreachable[0]
    return reached


@contextlib.contextmanager
def served_env(
    connect_options: "rlmesh_ray.ConnectOptions",
    num_envs: int,
    env_kwargs: dict[str, object] | None,
) -> "Iterator[rlmesh_ray.ConnectOptions]":
    """Yield the options for connecting to an environment, which this serves unless it runs."""
    env = connect_options.address
    if looks_like_address(env):
        yield connect_options
        return
    search_current_folder(env)
    with rlmesh_ray.EnvServer(env, num_envs=num_envs, env_kwargs=env_kwargs) as server:
        yield rlmesh_ray.ConnectOptions(server.address)


def contract_of(
    connect_options: "rlmesh_ray.ConnectOptions",
    env_kwargs: dict[str, object] | None = None,
    num_envs: int = 1,
) -> object:
    """Return the contract of an endpoint, or of an environment that this serves for a moment."""
    from rlmesh_ray.client.env.env_session_client import probe_endpoint

    with served_env(connect_options, num_envs, env_kwargs) as endpoint:
        return probe_endpoint(endpoint).contract


@contextlib.contextmanager
def served_model(
    connect_options: "rlmesh_ray.ConnectOptions",
    inference: str,
    observation_map: "rlmesh_ray.ObservationMap | None",
) -> "Iterator[rlmesh_ray.ConnectOptions]":
    """Yield the options for connecting to a policy, which this serves unless it runs."""
    if looks_like_address(connect_options.address):
        yield connect_options
        return
    from rlmesh_ray.models.loading import load_policy

    with muted():
        policy = load_policy(connect_options.address, inference=inference)
    with rlmesh_ray.ModelServer(
        policy, observation_map=observation_map, max_message_bytes=_OWN_MESSAGE_BYTES
    ) as server:
        yield rlmesh_ray.ConnectOptions(server.address)
