"""``rlmesh-ray evaluate``: the returns of a policy in an environment."""

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import CLIENT_LOG, RECORDING_LOG, muted, said
from rlmesh_ray.cli.options.common import (
    CONNECTION,
    ENVIRONMENT,
    OUTPUT,
    POLICY,
    SECURITY,
    DebugFlag,
    EditionText,
    EnvKwargs,
    Inference,
    InferenceOption,
    JsonFlag,
    MapOption,
    PlotOption,
    ResetTimeout,
    TlsAuthority,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    TokenFile,
    client_tls,
    file_option,
    non_negative_s,
    parse_env_kwargs,
    parse_map,
    positive_s,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.options.recording import (
    RecordMaxOption,
    RecordOption,
    RecordVideoOption,
    record_options,
)
from rlmesh_ray.cli.views.episodes_file import EpisodesFile, episodes_file
from rlmesh_ray.cli.views.evaluation_view import EvaluationView, name_options, show_result
from rlmesh_ray.errors import AccessDeniedError, ContractMismatchError, EndpointError, RlmeshError
from rlmesh_ray.options import DEFAULT_RESET_TIMEOUT_S, DEFAULT_STEP_TIMEOUT_S
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.evaluation import EpisodeResult
    from rlmesh_ray.server.env_server import EnvServer
    from rlmesh_ray.server.model_server import ModelServer
    from rlmesh_ray.spaces.observation_map import ObservationMap

MOST_LANES = 8
_EPISODES = "Episodes"
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
ModelOption = Annotated[
    list[str],
    typer.Option(
        "--model",
        metavar="CHECKPOINT_OR_ADDRESS",
        rich_help_panel=POLICY,
        help="What serve-model takes, such as random, or an endpoint; repeatable.",
    ),
]
EpisodesOption = Annotated[
    int,
    typer.Option("--episodes", min=1, rich_help_panel=_EPISODES, help="How many episodes."),
]
SeedOption = Annotated[
    int | None,
    typer.Option(
        "--seed",
        metavar="SEED",
        rich_help_panel=_EPISODES,
        help="Seed of the first episode, 0 or more; episode i starts with seed + i.",
    ),
]
LanesOption = Annotated[
    int | None,
    typer.Option(
        "--num-envs",
        min=1,
        rich_help_panel=ENVIRONMENT,
        help="Lanes of each session, for an id or a factory.",
        show_default="at most 8",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE.jsonl",
        rich_help_panel=OUTPUT,
        help="A new file for the episodes: one JSON object a line, written as each ends.",
    ),
]
EnvTimeoutOption = Annotated[
    float,
    typer.Option(
        "--env-timeout",
        metavar="SECONDS",
        rich_help_panel=_EPISODES,
        callback=positive_s,
        help="Longest wait for a step; then the endpoint is lost.",
    ),
]
ModelTimeoutOption = Annotated[
    float,
    typer.Option(
        "--model-timeout",
        metavar="SECONDS",
        rich_help_panel=_EPISODES,
        callback=positive_s,
        help="Longest wait for an answer of a policy.",
    ),
]
ReconnectOption = Annotated[
    float,
    typer.Option(
        "--reconnect-timeout",
        metavar="SECONDS",
        rich_help_panel=_EPISODES,
        callback=non_negative_s,
        help="Longest wait for an endpoint while all are lost.",
    ),
]
ModelTokenFile = Annotated[
    Path | None,
    file_option(
        "--model-token-file", SECURITY, "Token of the model's endpoint, if it is another one."
    ),
]
ModelTlsAuthority = Annotated[
    str | None,
    typer.Option(
        "--model-tls-ca",
        metavar="FILE",
        rich_help_panel=SECURITY,
        help="--tls-ca of the model's endpoint, if it is another one; "
        f"{_NO_TLS}: that endpoint uses no TLS.",
    ),
]
ExecutionHorizonOption = Annotated[
    int,
    typer.Option(
        "--execution-horizon",
        min=1,
        metavar="STEPS",
        rich_help_panel=POLICY,
        help="How many actions of each chunk are played, for policies that choose several at once.",
    ),
]
ImageCodecOption = Annotated[
    str | None,
    typer.Option(
        "--image-codec",
        metavar="CODEC",
        rich_help_panel=ENVIRONMENT,
        help="Have images travel compressed, such as jpeg:95.",
    ),
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


ResizeOption = Annotated[
    str | None,
    typer.Option(
        "--resize",
        metavar="HEIGHTxWIDTH",
        rich_help_panel=ENVIRONMENT,
        callback=_size,
        help="Have images travel in this size, such as 224x224.",
    ),
]
ModelEditionText = Annotated[
    str | None,
    typer.Option(
        "--model-edition-text",
        metavar="NAME_OR_SHA256",
        rich_help_panel=CONNECTION,
        help="--edition-text of the model's endpoint.",
    ),
]


def evaluate(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    env: EnvOption,
    model: ModelOption,
    episodes: EpisodesOption = 20,
    inference: InferenceOption = Inference.AUTO,
    observation_map: MapOption = None,
    execution_horizon: ExecutionHorizonOption = 1,
    seed: SeedOption = None,
    num_envs: LanesOption = None,
    env_kwargs: EnvKwargs = None,
    image_codec: ImageCodecOption = None,
    resize: ResizeOption = None,
    env_timeout: EnvTimeoutOption = DEFAULT_STEP_TIMEOUT_S,
    reset_timeout: ResetTimeout = DEFAULT_RESET_TIMEOUT_S,
    model_timeout: ModelTimeoutOption = DEFAULT_STEP_TIMEOUT_S,
    reconnect_timeout: ReconnectOption = 30.0,
    token_file: TokenFile = None,
    model_token_file: ModelTokenFile = None,
    tls_ca: TlsAuthority = None,
    model_tls_ca: ModelTlsAuthority = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_from_ray: TlsFromRay = False,
    edition_text: EditionText = None,
    model_edition_text: ModelEditionText = None,
    output: OutputOption = None,
    plot: PlotOption = None,
    record: RecordOption = None,
    record_max_gb: RecordMaxOption = 10.0,
    record_video: RecordVideoOption = "auto",
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Run episodes at all endpoints at once and summarize the returns.

    An id or a checkpoint is served while the command runs. An endpoint that dies costs no finished
    episode: the other endpoints go on, and the command dials it again.
    """
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.evaluation import check_seeds

    console: Console = context.obj
    check_seeds(episodes, seed)
    _require_addresses(env, edition_text, "--edition-text")
    _require_addresses(model, model_edition_text, "--model-edition-text")
    kwargs = parse_env_kwargs(env_kwargs)
    served_map, route_map = maps_for(observation_map, model)
    if kwargs is not None and all(looks_like_address(name) for name in env):
        raise typer.BadParameter(
            "for a Gymnasium id or a factory only; a running endpoint has its own",
            param_hint="--env-kwargs",
        )
    for name in env:
        search_current_folder(name)
    token = read_token(token_file)
    model_token = read_token(model_token_file) if model_token_file else token
    tls = client_tls(tls_ca, tls_cert, tls_key, from_ray=tls_from_ray)
    model_tls = None if model_tls_ca == _NO_TLS else tls
    if model_tls_ca is not None and model_tls_ca != _NO_TLS:
        model_tls = client_tls(Path(model_tls_ca), tls_cert, tls_key)
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(episodes_file(output))
        endpoints = [ConnectOptions(name, token, tls, edition_text=edition_text) for name in env]
        lanes = num_envs or min(math.ceil(episodes / len(env)), MOST_LANES)
        with console.waiting("starting the environment"):
            envs = [stack.enter_context(served_env(each, lanes, kwargs)) for each in endpoints]
            check_endpoints(envs, num_envs)
        policies = [
            ConnectOptions(name, model_token, model_tls, edition_text=model_edition_text)
            for name in model
        ]
        with console.waiting("loading the policy"):
            models = [
                stack.enter_context(served_model(each, inference, served_map)) for each in policies
            ]
        finished: list[EpisodeResult] = []
        try:
            run_and_show(
                console,
                envs,
                models,
                episodes,
                file,
                finished,
                seed=seed,
                env_timeout_s=env_timeout,
                reset_timeout_s=reset_timeout,
                model_timeout_s=model_timeout,
                reconnect_timeout_s=reconnect_timeout,
                observation_map=route_map,
                execution_horizon=execution_horizon,
                image_codec=image_codec,
                resize=resize,
                record=record_options(record, record_max_gb, record_video),
            )
        except BaseException:  # also after Ctrl-C: the finished episodes may have taken hours
            with contextlib.suppress(RlmeshError):  # the error is the first one
                _draw(console, finished, plot, model)
            raise
        _draw(console, finished, plot, model)


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
    from rlmesh_ray.evaluation import evaluate as run

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
    """Return the options for connecting to an environment, which is served unless it runs."""
    from rlmesh_ray.server.env_server import EnvServer

    make = functools.partial(EnvServer, num_envs=num_envs, env_kwargs=env_kwargs)
    return _served(connect_options, make)


def served_model(
    connect_options: "ConnectOptions", inference: str, observation_map: "ObservationMap | None"
) -> "contextlib.AbstractContextManager[ConnectOptions]":
    """Return the options for connecting to a policy, which is served unless it runs."""
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
