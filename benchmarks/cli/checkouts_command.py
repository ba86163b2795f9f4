"""``python -m benchmarks checkouts``: this checkout against another one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement

_ROUNDS = 30
_SECONDS = 0.5


def checkouts(
    context: typer.Context,
    other: Annotated[Path, typer.Argument(help="The root of the other checkout.")],
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PREFIX", help="Cases whose names begin so; repeatable."),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Turns of each side.")] = _ROUNDS,
    seconds: Annotated[float, typer.Option("--seconds", min=0.05, help="Of each turn.")] = _SECONDS,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure steps, predictions and samples of this checkout and of another one by turns.

    git worktree add ../before TAG makes the other one. Both use this virtual environment. The ratio
    is that of neighbouring turns; below it stand its quartiles.
    """
    require_rllib("benchmarks checkouts")
    from benchmarks.checkouts import CASES, compare
    from benchmarks.report import disturbances

    wanted = tuple(only or ("",))
    cases = [case for case in CASES if case.startswith(wanted)]
    if not cases:
        raise typer.BadParameter(
            f"no case begins so; there are {', '.join(CASES)}", param_hint="--only"
        )

    def caveats(_findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        return disturbances(measurements)

    settings = {"other": str(other), "rounds": rounds, "seconds": seconds, "only": cases}
    report = FindingsReport(context.obj, "checkouts", settings, caveats)
    return report.follow(compare(other, cases, rounds, seconds, report.note))
