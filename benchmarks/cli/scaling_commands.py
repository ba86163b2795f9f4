"""``python -m benchmarks scaling``: more endpoints, and what they cost."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import QuickFlag, RepetitionsOption, SecondsOption
from benchmarks.scaling.plan import ControlSize, Part, ScalingPlan, Simulation
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding
    from benchmarks.scaling.listener import Placed
    from rlmesh_ray.cli.console import Console

_USUAL = Simulation()
_PLOT = Path("runs/bench/scaling.png")


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long it takes by default."""

    parts: tuple[Part, ...]
    endpoints: tuple[int, ...]
    nodes: tuple[int, ...]
    repetitions: int
    warm_up_s: float
    seconds: float
    members: int


_THOROUGH = _Effort(tuple(Part), (1, 2, 4, 8, 16), (1, 4), 3, 2.0, 6.0, 4)
_QUICK = _Effort((Part.RATES, Part.MEMBERSHIP), (1, 4), (1,), 1, 1.0, 3.0, 2)
_AWAY = (Part.RATES, Part.MEMBERSHIP)
"""What can be measured on a cluster whose processes are elsewhere."""

PartsOption = Annotated[
    list[Part] | None,
    typer.Option(
        "--only", help="Measure just this; repeatable.", show_default="all; quick: not control"
    ),
]
EndpointsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--endpoints", help="How many; repeatable.", show_default="1, 2, 4, 8, 16; quick: 1, 4"
    ),
]
NodesOption = Annotated[
    list[int] | None,
    typer.Option(
        "--nodes",
        help="Ray nodes to start on this machine; repeatable. On several, steps go as messages, as "
        "between machines.",
        show_default="1, 4; quick: 1",
    ),
]
RunnersOption = Annotated[
    list[int] | None,
    typer.Option(
        "--runners", help="That share the endpoints; repeatable.", show_default="1, which has all"
    ),
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="A cluster to measure, as ray.init takes it, in place of nodes on this machine.",
        show_default="none",
    ),
]
FragmentOption = Annotated[
    int, typer.Option("--fragment", min=1, help="Steps of a lane in each call of sample().")
]
StepOption = Annotated[
    float,
    typer.Option("--step-ms", min=1.0, help="What a step of all lanes of an endpoint takes."),
]
LanesOption = Annotated[int, typer.Option("--lanes", min=1, help="Of each endpoint.")]
ControlEndpointsOption = Annotated[
    int, typer.Option("--control-endpoints", min=2, help="Of control, with 100 lanes each.")
]
PlotOption = Annotated[Path, typer.Option("--out", metavar="PNG", help="Where the plot goes.")]


def scaling(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    quick: QuickFlag = False,
    only: PartsOption = None,
    endpoints: EndpointsOption = None,
    nodes: NodesOption = None,
    runners: RunnersOption = None,
    ray_address: RayAddressOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    fragment: FragmentOption = 50,
    step_ms: StepOption = 1000 * _USUAL.step_s,
    lanes: LanesOption = _USUAL.lanes,
    control_endpoints: ControlEndpointsOption = 100,
    out: PlotOption = _PLOT,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure how sampling scales with endpoints, and what the control plane costs.

    rates: 1 to 16 endpoints, whose 8 lanes take 20 ms a step, with observations of 4 kB, if no
    option changes that; the goal is 0.9 of as many times one endpoint. membership: how long it
    takes to join an endpoint, and to lose one. control: memory and processor time of runner,
    registry and fleet. There is no learner.
    """
    from benchmarks.growth.plot import require_matplotlib
    from benchmarks.scaling.listener import Listener
    from benchmarks.scaling.measure import measure_scaling
    from benchmarks.scaling.report import caveats

    effort = _QUICK if quick else _THOROUGH
    plan = ScalingPlan(
        parts=tuple(dict.fromkeys(only or (effort.parts if ray_address is None else _AWAY))),
        endpoints=tuple(sorted(set(endpoints or effort.endpoints))),
        nodes=tuple(dict.fromkeys(nodes or (effort.nodes if ray_address is None else ()))),
        runners=tuple(dict.fromkeys(runners or (1,))),
        ray_address=ray_address,
        repetitions=repetitions or effort.repetitions,
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
        fragment=fragment,
        members=effort.members,
        simulation=Simulation(lanes=lanes, step_s=step_ms / 1000),
        control=ControlSize(endpoints=control_endpoints),
    )
    require_rllib("benchmarks scaling")
    require_matplotlib()
    notes = _Notes(context.obj)
    report = FindingsReport(
        context.obj,
        "scaling",
        asdict(plan),
        lambda _, measurements: [*notes.doubts, *caveats(notes.placed, measurements, plan)],
    )
    listener = Listener(report.note, notes.place, notes.doubts.append)
    return report.follow(
        measure_scaling(plan, listener), lambda findings: notes.finish(findings, plan, out)
    )


class _Notes:
    """Reports of a measurement besides its rates.

    Args:
        console: Where it is shown.
    """

    def __init__(self, console: "Console") -> None:
        self._console = console
        self.placed: list[Placed] = []
        self.doubts: list[str] = []

    def place(self, placed: "Placed") -> None:
        """Show the placement that was found."""
        self.placed.append(placed)
        self._console.event("placed", subject="scaling", **asdict(placed))

    def finish(
        self, findings: "Sequence[Finding]", plan: ScalingPlan, out: Path
    ) -> dict[str, object]:
        """Show where everything was, and draw the rates; return both for programs."""
        from benchmarks.scaling.plot import draw
        from benchmarks.scaling.report import places

        found: dict[str, object] = {"placed": [asdict(each) for each in self.placed]}
        if any(each.workload == Part.RATES for each in findings):
            self._console.show(places(self.placed))
            draw(findings, plan.setups, out)
            self._console.say(f"plot: {out}")
            found["plot"] = str(out)
        return found
