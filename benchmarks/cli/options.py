"""Options that several subjects of ``python -m benchmarks`` share."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlmesh_ray.options import INFERENCES

QuickFlag = Annotated[
    bool, typer.Option("--quick", help="About a minute instead of ten, and figures to match.")
]
RepetitionsOption = Annotated[
    int | None,
    typer.Option(
        "--repetitions",
        min=1,
        help="Fresh processes each time.",
        show_default="1 if quick, else 3 or 5",
    ),
]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", min=0.05, help="Of each measurement.", show_default="0.3 to 5"),
]
_INFERENCE = {
    "metavar": "|".join(INFERENCES),
    "help": "How our runner runs the module, as of configure; each is a side of its own; "
    "repeatable, or separated by commas.",
}
InferencesOption = Annotated[
    list[str] | None, typer.Option("--inference", show_default="auto,torch", **_INFERENCE)
]
LearningInferencesOption = Annotated[
    list[str] | None, typer.Option("--inference", show_default="torch,compiled", **_INFERENCE)
]
ReleasedPython = Annotated[
    Path | None,
    typer.Option(
        "--released-python",
        metavar="PATH",
        help="Python of the virtual environment with the released rlmesh.",
        show_default=".venvs/released/bin/python",
    ),
]
DmEnvRpcPython = Annotated[
    Path | None,
    typer.Option(
        "--dm-env-rpc-python",
        metavar="PATH",
        help="Python of the virtual environment with dm_env_rpc.",
        show_default=".venvs/dm_env_rpc/bin/python",
    ),
]


def inferences_of(values: Sequence[str] | None, default: Sequence[str]) -> tuple[str, ...]:
    """Return what ``--inference`` names, each once.

    Raises:
        BadParameter: There is something else among them.
    """
    named = [name.strip() for value in values or default for name in value.split(",")]
    for name in named:
        if name not in INFERENCES:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(INFERENCES)}", param_hint="--inference"
            )
    return tuple(dict.fromkeys(named))
