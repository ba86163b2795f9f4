"""``rlmesh-ray serve-model``: serves a policy as an endpoint."""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Unpack

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import LogFormatOption, muted
from rlmesh_ray.cli.options.common import (
    POLICY,
    SERVING,
    DebugFlag,
    JsonFlag,
    MapOption,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    TokenFile,
    parse_map,
    read_token,
    search_current_folder,
)
from rlmesh_ray.cli.options.flags import takes_flags
from rlmesh_ray.cli.options.metrics import MetricsAddress
from rlmesh_ray.cli.options.serving import (
    TlsClientAuthority,
    client_options,
    server_tls,
    token_fact,
)
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.server.log_format import LogFormat
from rlmesh_ray.server.model_options import ModelServerOptions

if TYPE_CHECKING:
    from rlmesh_ray.server.model_server import ModelServer


Explore = Annotated[
    bool,
    typer.Option(
        "--explore",
        rich_help_panel=POLICY,
        help="Sample actions, not the most likely ones (RLlib).",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        rich_help_panel=POLICY,
        help="The policy's device, such as cuda:0.",
        show_default="cpu",
    ),
]
Buckets = Annotated[
    list[int] | None,
    typer.Option(
        "--bucket",
        min=1,
        metavar="ROWS",
        rich_help_panel=POLICY,
        help="Pad batches to this many rows, so that the device sees few sizes; repeatable.",
    ),
]
OpenpiEnv = Annotated[
    str | None,
    typer.Option(
        "--openpi-env",
        metavar="ENV",
        rich_help_panel=SERVING,
        help="An environment with openpi clients' spaces.",
    ),
]


@takes_flags(ModelServerOptions)
def serve_model(  # noqa: PLR0913  # the flags that are not made from the server's options
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="An RLlib checkpoint folder, a TorchScript, torch.export or ONNX file, your "
            "module:factory, or random.",
        ),
    ],
    explore: Explore = False,
    device: Device = None,
    bucket: Buckets = None,
    key_map: MapOption = None,
    openpi_spaces: OpenpiEnv = None,
    token_file: TokenFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientAuthority = None,
    tls_from_ray: TlsFromRay = False,
    metrics_address: MetricsAddress = None,
    log_format: LogFormatOption = LogFormat.TEXT,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
    **options: Unpack[ModelServerOptions],
) -> None:
    """Serve a policy to many clients at once, until it is stopped.

    Loading runs code: serve only checkpoints that you trust.
    """
    dialect = registry.client_dialect(checkpoint)
    if dialect is not None and dialect.serves_models:
        raise ConfigurationError(
            f"{checkpoint} is a policy's server, and serve-model serves none again: have clients "
            f"dial it, RemoteModel({checkpoint!r}) or evaluate --model {checkpoint}"
        )
    if looks_like_address(checkpoint):
        raise ConfigurationError(
            f"{checkpoint} is an address; give serve-model the checkpoint, file or module:factory "
            f"to serve, and the address as --address {checkpoint}"
        )
    address, openpi, no_token = options["address"], options["openpi"], options["no_token"]
    if openpi_spaces is not None and openpi is None:
        raise typer.BadParameter(
            "it is for openpi clients; give --openpi HOST:PORT, too", param_hint="--openpi-env"
        )
    # Ctrl-C while the checkpoint loads ends the command as it does later.
    with contextlib.suppress(KeyboardInterrupt):
        from rlmesh_ray.cli.serve_loop import quiet_for_programs, serve
        from rlmesh_ray.models.loading import load_policy
        from rlmesh_ray.server.bind_policy import checked_address
        from rlmesh_ray.server.model_server import ModelServer

        console: Console = context.obj
        quiet_for_programs(console, log_format)
        options["observation_map"] = parse_map(key_map)
        options["token"] = token = read_token(token_file)
        options["tls"] = server_tls(tls_cert, tls_key, tls_client_ca, from_ray=tls_from_ray)
        # Loading the policy may take long.
        checked_address(address, token, no_token=no_token)
        if openpi is not None:
            checked_address(openpi, token, no_token=no_token)
        if openpi_spaces is not None:
            options["openpi_env"] = _contract(console, openpi_spaces)
        # Of loading the policy, not of the server.
        horizon, inference = options.pop("horizon"), options.pop("inference")
        with console.waiting("loading the checkpoint"), muted():
            policy = load_policy(
                checkpoint,
                explore=explore,
                device=device,
                buckets=sorted(set(bucket or ())),
                inference=inference,
                horizon=horizon,
            )
        server = ModelServer(policy, **options)
        files = (token_file, tls_cert, tls_client_ca)
        shown = [
            client_options(*files, from_ray=tls_from_ray, prefix=prefix)
            for prefix in ("--", "--model-")
        ]
        protection = token_fact(token, token_file)
        run = functools.partial(serve, log_format=log_format, metrics_address=metrics_address)
        _serve(console, server, checkpoint, protection, shown, run)


def _contract(console: Console, env: str) -> object:
    """Return the contract of an environment, which is made for a moment unless it is served."""
    from rlmesh_ray.cli.commands.evaluate import served_env
    from rlmesh_ray.client.channel import ConnectOptions
    from rlmesh_ray.client.env_session_client import probe_endpoint

    search_current_folder(env)
    with (
        console.waiting("starting the environment"),
        served_env(ConnectOptions(env), 1, None) as options,
    ):
        return probe_endpoint(options).contract


def _serve(
    console: Console,
    server: "ModelServer",
    checkpoint: str,
    protection: dict[str, str],
    options: Sequence[str],
    run: Callable[..., None],
) -> None:
    def announce() -> None:
        console.event(
            "serving",
            address=server.address,
            service="model",
            checkpoint=checkpoint,
            **({} if server.openpi_address is None else {"openpi": server.openpi_address}),
            pid=os.getpid(),
            version=__version__,
        )
        facts = {"policy": checkpoint, **protection, "stop with": "Ctrl-C"}
        if server.openpi_address is not None:
            facts = {"openpi clients": f"ws://{server.openpi_address}", **facts}
        console.facts(
            f"serving on {server.address}",
            facts,
            [
                f"inspect {server.address}{options[0]}",
                f"evaluate --env ENV_OR_ADDRESS --model {server.address}{options[1]}",
            ],
        )

    run(console, server, announce)
