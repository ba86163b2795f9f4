"""``python -m benchmarks robots``: slow policies for simulators and robots."""

import importlib.util
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import QuickFlag, RepetitionsOption, SecondsOption
from benchmarks.robots.plan import RobotsPlan, Row
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement

RowsOption = Annotated[
    list[Row] | None, typer.Option("--only", help="Measure this only; repeatable.")
]


def robots(  # the command line; every option stands alone
    context: typer.Context,
    quick: QuickFlag = False,
    only: RowsOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure a policy that takes 20 ms for any number of rows, as large networks on a GPU do.

    chunks: the rate that a simulator of 50 steps a second keeps, with one action a request and with
    chunks of 8, asked for when the last one is played and ahead of time. batched: what 8 clients
    get that ask again at once, without and with max_delay_s, beside batches of 8 in one process.
    openpi: the same with clients of openpi's protocol, beside a server that answers one at a time.
    cameras: two images of 640x480 over a link of 100 Mbit/s to a policy that answers at once, as
    JPEG of 224x224 and as they are; Linux, as root.
    """
    from benchmarks.report import disturbances
    from benchmarks.robots.measure import measure_robots
    from benchmarks.robots.thin_link import lacking

    has_openpi = all(map(importlib.util.find_spec, ("msgpack", "websockets")))
    needs = {Row.OPENPI: "" if has_openpi else "msgpack and websockets", Row.CAMERAS: lacking()}
    missing = {row: what for row, what in needs.items() if what and not only}
    left_out = [f"{row} is left out: it needs {what}" for row, what in missing.items()]
    plan = RobotsPlan(
        rows=tuple(row for row in dict.fromkeys(only or Row) if row not in missing),
        repetitions=repetitions or (1 if quick else 3),
        warm_up_s=0.5 if quick else 1.0,
        seconds=seconds or (2.0 if quick else 5.0),
    )

    def caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        del findings  # a share of what is possible needs no busy client
        return [*disturbances(measurements), *left_out]

    report = FindingsReport(context.obj, "robots", asdict(plan), caveats)
    return report.follow(measure_robots(plan, report.note))
