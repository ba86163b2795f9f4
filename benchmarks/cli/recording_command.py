"""``python -m benchmarks recording``: what recorded episodes cost."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import QuickFlag, RepetitionsOption, SecondsOption
from benchmarks.recording.plan import RecordingPlan, RecordingRow
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement

RowsOption = Annotated[
    list[RecordingRow] | None, typer.Option("--only", help="Measure this only; repeatable.")
]


def recording(  # the command line; every option stands alone
    context: typer.Context,
    quick: QuickFlag = False,
    only: RowsOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure what recording costs.

    steps: 64 lanes of CartPole through shared memory, with and without --record. video: the
    processor time of the writer for 8 lanes of 84x84x4 at 30 frames a second. index: how long
    load() takes for 10,000 episodes. render: how long render() of ten lanes of CartPole takes, and
    SyncVectorEnv's. evaluate: the processor time of evaluate --record for each frame of 4 episodes
    of CartPole, with videos and without, and of drawing a frame.
    """
    from benchmarks.recording.measure import measure_recording
    from benchmarks.report import disturbances

    plan = RecordingPlan(
        rows=tuple(dict.fromkeys(only or RecordingRow)),
        repetitions=repetitions or (1 if quick else 3),
        seconds=seconds or (2.0 if quick else 5.0),
    )

    def caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        del findings
        return disturbances(measurements)

    report = FindingsReport(context.obj, "recording", asdict(plan), caveats)
    return report.follow(measure_recording(plan, report.note))
