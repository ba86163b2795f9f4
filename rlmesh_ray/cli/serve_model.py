"""``rlmesh-ray serve-model``: a policy as an endpoint."""

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.logs import muted
from rlmesh_ray.cli.options import (
    AddressToListen,
    DebugFlag,
    JsonFlag,
    TlsCertificate,
    TlsKey,
    TokenFile,
    read_token,
    server_tls,
)


def serve_model(
    context: typer.Context,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="An RLlib checkpoint folder, a TorchScript or torch.export file, or "
            "module:factory of your own code.",
        ),
    ],
    address: AddressToListen = "127.0.0.1:0",
    token_file: TokenFile = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Serve a policy to many clients at once, until Ctrl-C.

    Loading runs code: serve only checkpoints that you trust.
    """
    # Ctrl-C while the checkpoint loads ends the command as it does later.
    with contextlib.suppress(KeyboardInterrupt):
        _serve(context.obj, checkpoint, address, token_file, (tls_cert, tls_key))


def _serve(
    console: Console,
    checkpoint: str,
    address: str,
    token_file: Path | None,
    tls_files: tuple[Path | None, Path | None],
) -> None:
    from rlmesh_ray.cli.serving import serve
    from rlmesh_ray.models.loading import load_policy
    from rlmesh_ray.server.model_server import ModelServer

    token, tls = read_token(token_file), server_tls(*tls_files)
    with muted():
        policy = load_policy(checkpoint)
    server = ModelServer(policy, address=address, token=token, tls=tls)

    def announce() -> None:
        console.event(
            "serving",
            address=server.address,
            service="model",
            checkpoint=checkpoint,
            pid=os.getpid(),
            version=__version__,
        )
        protected = {"token": "required"} if token else {}
        console.facts(
            f"serving on {server.address}",
            {"policy": checkpoint, **protected, "stop with": "Ctrl-C"},
            [
                f"inspect {server.address}",
                f"evaluate --env ENV_OR_ADDRESS --model {server.address} --episodes 20",
            ],
        )

    serve(console, server, announce)
