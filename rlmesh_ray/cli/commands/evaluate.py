"""``rlmesh-ray evaluate``: the returns of a policy in an environment."""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from rlmesh_ray.cli.console import Console
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
from rlmesh_ray.cli.views.evaluation_view import (
    EpisodesFile,
    EvaluationView,
    name_options,
    show_result,
)
from rlmesh_ray.errors import AccessDeniedError, ContractMismatchError, EndpointError, RlmeshError
from rlmesh_ray.evaluation.options import RecordedEvaluationOptions, checked_seed
from rlmesh_ray.options import INFERENCES
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.evaluation.result import EpisodeResult
    from rlmesh_ray.server.env_server import EnvServer
    from rlmesh_ray.server.model_server import ModelServer
    from rlmesh_ray.spaces.observation_map import ObservationMap

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

    def to(self, connection: ConnectionFlags) -> "ConnectOptions":
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
    kwargs = flags.kwargs()
    served_map, options["observation_map"] = maps_for(flags.map, model)
    if kwargs is not None and all(looks_like_address(name) for name in env):
        raise typer.BadParameter(
            "for a Gymnasium id or a factory only; a running endpoint has its own",
            param_hint="--env-kwargs",
        )
    for name in env:
        search_current_folder(name)
    to_env, to_model = connection.to(""), flags.to(connection)
    options["resize"] = flags.resize  # type: ignore[typeddict-item]  # ``_size`` has read it
    options["record"] = recording.options()
    with contextlib.ExitStack() as stack:
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


def _draw(
    console: Console, finished: "list[EpisodeResult]", plot: Path | None, model: list[str]
) -> None:
    if plot is not None and finished:
        from rlmesh_ray.evaluation.plot import plot_evaluation

        plot_evaluation(finished, plot, ", ".join(model))
        console.say(f"plot: {plot}")


def run_and_show(
    console: Console,
    envs: "list[ConnectOptions]",
    models: "list[ConnectOptions]",
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
        if isinstance(error, EndpointError):
            name_options(error, addresses[1])
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
) -> "tuple[ObservationMap | None, ObservationMap | None]":
    """Return the map of policies that this command serves, and that of routes to endpoints.

    A policy that is served here maps by itself, as its own space completes the map.
    """
    mapping = parse_map(texts)
    is_remote = any(looks_like_address(name) for name in models)
    return (None, mapping) if is_remote else (mapping, None)


def check_endpoints(
    endpoints: "list[ConnectOptions]", num_envs: int | None
) -> "list[ConnectOptions]":
    """Check what endpoints serve, before a policy is loaded or a session is opened.

    Returns:
        Those that can be reached.

    Raises:
        ContractMismatchError: An endpoint serves another environment than the first one, or its
            sessions have another width than ``num_envs``.
        EndpointError: None of them can be reached, or one requires another token.
    """
    from rlmesh_ray.client.env_session_client import probe_endpoint
    from rlmesh_ray.evaluation.coordinator import require_same_environment
    from rlmesh_ray.spaces.contract import EnvContract

    unreachable: list[EndpointError] = []
    reached: list[ConnectOptions] = []
    first: tuple[str, EnvContract] | None = None
    for connect_options in endpoints:
        address = connect_options.address
        try:
            contract = probe_endpoint(connect_options).contract
        except AccessDeniedError:
            raise
        except EndpointError as error:
            name_options(error, ())
            unreachable.append(error)
            continue
        width = getattr(contract, "num_envs", None)
        if num_envs not in (None, width):
            raise ContractMismatchError(
                f"{address} serves {width} lanes a session, not {num_envs}; leave --num-envs out"
            )
        reached.append(connect_options)
        if isinstance(contract, EnvContract):
            first = first or (address, contract)
            require_same_environment(address, contract, *first)
    if not reached:
        raise unreachable[0]
    return reached


@contextlib.contextmanager
def _served(
    connect_options: "ConnectOptions", make_server: "Callable[[str], EnvServer | ModelServer]"
) -> "Iterator[ConnectOptions]":
    """Yield the options for connecting to an endpoint, which this serves unless it runs."""
    from rlmesh_ray.client.channel import ConnectOptions

    if looks_like_address(connect_options.address):
        yield connect_options
        return
    with make_server(connect_options.address) as server:
        yield ConnectOptions(server.address)


def served_env(
    connect_options: "ConnectOptions", num_envs: int, env_kwargs: dict[str, object] | None
) -> "contextlib.AbstractContextManager[ConnectOptions]":
    from rlmesh_ray.server.env_server import EnvServer

    make = functools.partial(EnvServer, num_envs=num_envs, env_kwargs=env_kwargs)
    return _served(connect_options, make)


def served_model(
    connect_options: "ConnectOptions", inference: str, observation_map: "ObservationMap | None"
) -> "contextlib.AbstractContextManager[ConnectOptions]":
    make = functools.partial(_model_server, inference=inference, observation_map=observation_map)
    return _served(connect_options, make)


def _model_server(
    checkpoint: str, inference: str, observation_map: "ObservationMap | None"
) -> "ModelServer":
    from rlmesh_ray.models.loading import load_policy
    from rlmesh_ray.server.model_server import ModelServer

    with muted():
        policy = load_policy(checkpoint, inference=inference)
    return ModelServer(
        policy, observation_map=observation_map, max_message_bytes=_OWN_MESSAGE_BYTES
    )
