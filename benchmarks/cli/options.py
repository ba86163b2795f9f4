"""Options that several subjects of ``python -m benchmarks`` share."""

from pathlib import Path
from typing import Annotated

import typer

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
