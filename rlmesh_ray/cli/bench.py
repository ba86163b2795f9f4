"""``rlmesh-ray bench``: how fast it is on this machine, against what one would use instead.

Every subject is a command of its own. A new one needs a generator of findings in ``bench``, a
command here, and a line in ``everything``.
"""

import enum
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.bench.plan import Plan, Side, Workload
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from rich.status import Status

    from rlmesh_ray.bench.findings import Finding, Measurement

app = typer.Typer()

_INTERRUPTED = 130


class Rival(enum.StrEnum):
    """Whom one can compare with; some of ``Side``."""

    NOOP = Side.NOOP.value
    RELEASED = Side.RELEASED.value


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long it takes unless told otherwise."""

    repetitions: int
    warm_up_s: float
    seconds: float
    latency_s: float


_THOROUGH = _Effort(repetitions=5, warm_up_s=0.5, seconds=2.0, latency_s=60.0)
_QUICK = _Effort(repetitions=1, warm_up_s=0.2, seconds=0.5, latency_s=3.0)

VsOption = Annotated[
    list[Rival] | None,
    typer.Option(
        "--vs",
        help="Compare with a grpc.aio server that does nothing (noop, the default), or with the "
        "released rlmesh; repeatable.",
    ),
]
QuickFlag = Annotated[
    bool, typer.Option("--quick", help="A minute instead of ten, and figures to match.")
]
OnlyOption = Annotated[
    list[Workload] | None, typer.Option("--only", help="Measure just this; repeatable.")
]
RepetitionsOption = Annotated[
    int | None,
    typer.Option("--repetitions", min=1, help="Fresh processes each time.", show_default="5"),
]
SecondsOption = Annotated[
    float | None,
    typer.Option("--seconds", min=0.05, help="Of each measurement.", show_default="2"),
]
LatencySecondsOption = Annotated[
    float | None,
    typer.Option(
        "--latency-seconds", min=0.05, help="Of the arrivals, for latency.", show_default="60"
    ),
]
ClientProcessesOption = Annotated[
    int,
    typer.Option("--client-processes", min=1, help="Over which the routes are spread."),
]
PinFlag = Annotated[
    bool, typer.Option("--pin", help="A core for the server, the others for its clients (Linux).")
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


@app.callback(invoke_without_command=True)
def everything(
    context: typer.Context,
    vs: VsOption = None,
    quick: QuickFlag = False,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int | None:
    """Measure on this machine, everything or one subject: ratios inside one run, with quartiles.

    Each side runs in fresh processes, in turns. Other programs disturb: what they took is told.
    """
    if context.invoked_subcommand is None:
        return serving(context, vs=vs, quick=quick)
    if vs or quick:
        raise typer.BadParameter(f"options stand after {context.invoked_subcommand}")
    return None


@app.command()
def serving(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    vs: VsOption = None,
    quick: QuickFlag = False,
    only: OnlyOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    latency_seconds: LatencySecondsOption = None,
    client_processes: ClientProcessesOption = 1,
    pin: PinFlag = False,
    released_python: ReleasedPython = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure the serving of policies, with raw clients and a 4-64-64-2 network.

    messages: Predicts a second of 1, 8 and 32 routes. rows: lanes a second, 32 routes of 32.
    latency: requests that arrive at random, at 70 % of the capacity (not at the released rlmesh,
    which ends such connections). clients: 64 to 256.
    single: what batching costs a client that is alone.
    """
    from rlmesh_ray.bench.serving import measure
    from rlmesh_ray.bench.sides import RELEASED_PYTHON, Bench

    effort = _QUICK if quick else _THOROUGH
    plan = Plan(
        workloads=tuple(dict.fromkeys(only or Workload)),
        rivals=tuple(Side(rival.value) for rival in dict.fromkeys(vs or [Rival.NOOP])),
        repetitions=repetitions or effort.repetitions,
        latency_s=latency_seconds or effort.latency_s,
    )
    bench = Bench(
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
        client_processes=client_processes,
        is_pinned=pin,
        released_python=released_python or RELEASED_PYTHON,
    )
    report = _Report(context.obj, "serving", {**asdict(plan), **asdict(bench)})
    return report.follow(measure(plan, bench, report.note))


class _Report:
    """Tells what is measured, as it is.

    Args:
        console: Where.
        subject: The command.
        settings: For programs.
    """

    def __init__(self, console: Console, subject: str, settings: dict[str, object]) -> None:
        from rlmesh_ray.bench.machine import describe

        self._console = console
        self._subject = subject
        self._settings = settings
        self._machine = describe()
        self._measurements: list[Measurement] = []
        self._findings: list[Finding] = []
        self._status: Status | None = None

    def note(self, measurement: "Measurement") -> None:
        """Take one measurement in, as soon as it is made."""
        self._measurements.append(measurement)
        self._console.event("measurement", subject=self._subject, **asdict(measurement))
        if self._status is not None:
            self._status.update(f"{measurement.workload}: {measurement.case}, {measurement.side} …")

    def follow(self, workloads: "Iterable[list[Finding]]") -> int:
        """Show findings as they come, and the sum at the end; return the exit code.

        Args:
            workloads: The findings of each; measured while they are iterated over.
        """
        from rlmesh_ray.bench.report import machine_facts

        self._console.event("machine", **asdict(self._machine))
        self._console.facts(f"bench {self._subject}", machine_facts(self._machine), [])
        is_complete = False
        try:
            if self._console.people.is_terminal:
                with self._console.people.status("measuring …") as self._status:
                    self._take(workloads)
            else:
                self._take(workloads)
            is_complete = True
        except KeyboardInterrupt:
            pass  # what was found so far may be what was looked for
        finally:
            self._status = None
        self._sum_up(is_complete=is_complete)
        return 0 if is_complete else _INTERRUPTED

    def _take(self, workloads: "Iterable[list[Finding]]") -> None:
        from rlmesh_ray.bench.report import table

        for findings in workloads:
            self._findings += findings
            for finding in findings:
                self._console.event("finding", subject=self._subject, **finding.as_json())
            self._console.show(table(findings))

    def _sum_up(self, *, is_complete: bool) -> None:
        from rlmesh_ray.bench.report import caveats, cores

        warnings = caveats(self._findings, self._measurements)
        if self._measurements:
            self._console.show(cores(self._measurements))
        for warning in warnings:
            self._console.say(f"! {warning}", style="yellow")
        self._console.event(
            "result",
            subject=self._subject,
            is_complete=is_complete,
            machine=asdict(self._machine),
            settings=self._settings,
            findings=[finding.as_json() for finding in self._findings],
            caveats=warnings,
        )
