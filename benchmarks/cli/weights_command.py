"""``python -m benchmarks weights``: how long new weights of a policy take."""

from typing import TYPE_CHECKING

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import RepetitionsOption
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement


def weights(
    context: typer.Context,
    repetitions: RepetitionsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure how long a served policy takes for new weights.

    Until the first prediction with them: a dense network and one with convolutions, compiled and in
    torch, by turns in one process.
    """
    require_rllib("benchmarks weights", ("torch", "onnxruntime"))
    from benchmarks.weights import measure_weights

    repetitions = repetitions or 20

    def caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        del findings, measurements
        return []

    report = FindingsReport(context.obj, "weights", {"repetitions": repetitions}, caveats)
    return report.follow(measure_weights(repetitions))
