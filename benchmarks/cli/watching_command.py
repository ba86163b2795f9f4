"""``python -m benchmarks watching``: what the live page costs, and how soon it is there."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import QuickFlag, RepetitionsOption
from benchmarks.watching.measure import WatchingPlan, WatchingRow, measure_watching
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement

WatchingRowsOption = Annotated[
    list[WatchingRow] | None, typer.Option("--only", help="Measure this only; repeatable.")
]


def watching(
    context: typer.Context,
    quick: QuickFlag = False,
    only: WatchingRowsOption = None,
    repetitions: RepetitionsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure the live page of rlmesh-ray watch.

    cost: the rate of a training on one endpoint, with and without a page that shows one of its
    lanes, by turns in one training. paint: the first paint of a page of 100 endpoints, in Chromium
    on this machine. episodes: how soon a recording of 10,000 episodes is there.
    """
    from benchmarks.watching.browsing import lacking

    missing = lacking()
    rows = tuple(dict.fromkeys(only or WatchingRow))
    if missing and not only:
        rows = (WatchingRow.COST,)
    plan = WatchingPlan(rows, pairs=4 if quick else 40, repetitions=repetitions or 5)

    def caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        del findings, measurements
        return [f"paint and episodes are left out: they need {missing}"] if missing else []

    report = FindingsReport(context.obj, "watching", asdict(plan), caveats)
    return report.follow(measure_watching(plan, context.obj.say))
