"""``rlmesh-ray export``: writes a policy as an ONNX file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

import rlmesh_ray
from rlmesh_ray.cli.commands.evaluate import contract_of
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import muted
from rlmesh_ray.cli.options.common import (
    ENVIRONMENT,
    ClientSecurity,
    MadeEnvFlags,
    flag,
    search_current_folder,
)
from rlmesh_ray.errors import ContractMismatchError


@dataclass(frozen=True)
class SpacesFlags(MadeEnvFlags):
    """The environment whose spaces a file is for."""

    env: str | None = flag(
        ENVIRONMENT,
        "For a module of torch: a Gymnasium id, module:factory or an endpoint, whose spaces "
        "the file is for.",
        metavar="ENV_OR_ADDRESS",
        show_default="the checkpoint's own spaces",
    )


def export(
    console: Console,
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT",
            help="An RLlib checkpoint folder, a TorchScript or torch.export file, or "
            "module:factory of your own code that returns a torch.nn.Module.",
        ),
    ],
    file: Annotated[
        Path, typer.Argument(metavar="FILE.onnx", help="The file to write; an old one is replaced.")
    ],
    spaces: SpacesFlags,
    security: ClientSecurity,
) -> None:
    """Write a policy as an ONNX file: from observations to the most likely actions.

    The file is written only if it acts as the policy does in torch, for 1,000 observations. It
    needs neither torch nor Ray: serve-model and evaluate take it, and ONNX Runtime in any language.

    Loading runs code: export only checkpoints that you trust.
    """
    search_current_folder(checkpoint)
    from rlmesh_ray.models.onnx.policy_export import export_policy

    env = spaces.env
    if env is None and spaces.env_kwargs is not None:
        raise typer.BadParameter(
            "for --env with a Gymnasium id or a factory only", param_hint="--env-kwargs"
        )
    kwargs = spaces.kwargs(() if env is None else (env,))
    contract = None
    if env is not None:
        with console.waiting("starting the environment"):
            contract = _contract(security.to(env), kwargs)
    with console.waiting("loading, exporting and comparing the policy"), muted():
        proof = export_policy(checkpoint, file, contract=contract)
    console.event("exported", file=str(file), **proof._asdict())
    console.say(str(proof))
    console.facts(
        str(file),
        {"policy": checkpoint, "size": f"{file.expanduser().stat().st_size:,} bytes"},
        [f"serve-model {file}"],
    )


def _contract(
    connect_options: "rlmesh_ray.ConnectOptions", env_kwargs: dict[str, object] | None
) -> "rlmesh_ray.EnvContract":
    contract = contract_of(connect_options, env_kwargs)
    if not isinstance(contract, rlmesh_ray.EnvContract):
        raise ContractMismatchError(
            f"{connect_options.address} has several agents, and a policy that is exported acts for "
            "one; name an environment of one agent"
        )
    return contract
