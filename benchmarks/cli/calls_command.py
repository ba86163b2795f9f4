"""``python -m benchmarks calls``: how many functions a step and a prediction call."""

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.calls.plan import Subject
from benchmarks.cli.progress_view import BenchView
from rlmesh_ray.cli.local_ray import missing_packages, require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

OnlyOption = Annotated[
    list[Subject] | None, typer.Option("--only", help="Count this only; repeatable.")
]


def calls(
    context: typer.Context,
    only: OnlyOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Count the calls of the package's functions per step and per prediction: no times.

    step: of 1 and 64 lanes, over each transport. prediction: of 1 and 32 rows, by a function.
    runner: a step of RLMeshEnvRunner, where RLlib is installed. The same on every machine: no wait
    spins, and what timers call is left out.
    """
    from rich.table import Table

    from benchmarks.calls.measure import calls_of

    if Subject.RUNNER in (only or ()):
        require_rllib("benchmarks calls --only runner")
    skipped = {Subject.RUNNER} if missing_packages() else set()
    chosen = [each for each in Subject if each in (only or set(Subject) - skipped)]
    console = context.obj
    view = BenchView(console, "calls", {"only": chosen})
    table = Table("calls per", "client", "its files", "endpoint", "worker", "all files")
    found = []

    def measure() -> None:
        for subject in chosen:
            view.now(subject)
            for each in calls_of(subject):
                found.append(asdict(each))
                console.event("calls", **found[-1])
                table.add_row(*("" if each is None else str(each) for each in found[-1].values()))
        console.show(table)

    is_complete = view.follow(measure)
    return view.sum_up(is_complete=is_complete, caveats=[], found={"calls": found})
