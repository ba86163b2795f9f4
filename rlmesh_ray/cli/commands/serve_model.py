"""``rlmesh-ray serve-model``: serves a policy as an endpoint."""

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Unpack

import typer

import rlmesh_ray
from rlmesh_ray.cli.commands.evaluate import contract_of
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import muted
from rlmesh_ray.cli.options.common import (
    POLICY,
    SERVING,
    EndpointSecurity,
    MonitoringFlags,
    flag,
    map_flag,
    parse_map,
    read_token,
)
from rlmesh_ray.cli.serve_loop import quiet_for_programs, serve
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions
from rlmesh_ray.server.model.model_options import ModelServerOptions


@dataclass(frozen=True)
class PolicyFlags:
    """How a policy is loaded, and whose spaces openpi clients have, which send none."""

    explore: bool = flag(POLICY, "Sample actions, not the most likely ones (RLlib).", False)
    device: str | None = flag(
        POLICY, "The policy's device, such as cuda:0.", metavar="DEVICE", show_default="cpu"
    )
    bucket: list[int] | None = flag(
        POLICY,
        "Pad batches to this many rows, so that the device sees few sizes; repeatable.",
        min=1,
        metavar="ROWS",
    )
    map: list[str] | None = map_flag()
    openpi_env: str | None = flag(
        SERVING, "An environment with openpi clients' spaces.", metavar="ENV"
    )


def serve_model(
    console: Console,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="An RLlib checkpoint folder, a TorchScript, torch.export or ONNX file, your "
            "module:factory, or random.",
        ),
    ],
    loading: PolicyFlags,
    listen: Annotated[ListenOptions, "data_address"],
    security: EndpointSecurity,
    monitoring: MonitoringFlags,
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
    if loading.openpi_env is not None and listen.openpi is None:
        raise typer.BadParameter(
            "it is for openpi clients; give --openpi HOST:PORT, too", param_hint="--openpi-env"
        )
    # Ctrl-C while the checkpoint loads ends the command as it does later.
    with contextlib.suppress(KeyboardInterrupt):
        from rlmesh_ray.models.loading import load_policy
        from rlmesh_ray.server.endpoint.bind_policy import checked_address

        quiet_for_programs(console, monitoring.log_format)
        options["observation_map"] = parse_map(loading.map)
        token = read_token(security.token_file)
        options["address"], options["token"] = listen, security.required(token)
        options["tls"] = security.tls()
        for address in (listen.address, listen.openpi):  # now: loading the policy may take long
            if address is not None:
                checked_address(address, options["token"])
        if loading.openpi_env is not None:
            with console.waiting("starting the environment"):
                options["openpi_env"] = contract_of(rlmesh_ray.ConnectOptions(loading.openpi_env))
        with console.waiting("loading the checkpoint"), muted():
            policy = load_policy(
                checkpoint,
                explore=loading.explore,
                device=loading.device,
                buckets=sorted(set(loading.bucket or ())),
                # Of loading the policy, not of the server.
                inference=options.pop("inference"),
                horizon=options.pop("horizon"),
            )
        server = rlmesh_ray.ModelServer(policy, **options)
        shown = [security.of_clients(prefix) for prefix in ("--", "--model-")]
        run = functools.partial(serve, monitoring=monitoring)
        _serve(console, server, checkpoint, security.token_fact(token), shown, run)


def _serve(
    console: Console,
    server: "rlmesh_ray.ModelServer",
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
            version=rlmesh_ray.__version__,
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
