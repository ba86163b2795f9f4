"""``stepping``, ``sampling``, ``profile`` and ``growth``: environments that are elsewhere."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import (
    DmEnvRpcPython,
    InferencesOption,
    QuickFlag,
    ReleasedPython,
    RepetitionsOption,
    SecondsOption,
    inferences_of,
)
from benchmarks.cli.progress_view import BenchView
from benchmarks.growth.plan import Axis, GrowthPlan
from benchmarks.sampling.plan import Rival, SamplingPlan, Task
from benchmarks.stepping.plan import Peer, Row, SteppingPlan, rows_of
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from benchmarks.findings import Finding, Measurement
    from benchmarks.sampling.measure import UsedInference
    from benchmarks.stepping.measure import Installations

_PLOT = Path("runs/bench/growth.png")


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long it takes by default."""

    repetitions: int
    warm_up_s: float
    seconds: float


_STEPPING, _QUICK_STEPPING = _Effort(5, 0.5, 2.0), _Effort(1, 0.2, 0.5)
_SAMPLING, _QUICK_SAMPLING = _Effort(5, 1.0, 5.0), _Effort(1, 0.5, 2.0)
_GROWTH, _QUICK_GROWTH = _Effort(3, 0.5, 1.0), _Effort(1, 0.2, 0.3)

PeersOption = Annotated[
    list[Peer] | None,
    typer.Option(
        "--vs",
        help="Compare with gymnasium's SyncVectorEnv or AsyncVectorEnv, with the released rlmesh, "
        "with dm_env_rpc, EnvPool, or gRPC alone; repeatable.",
        show_default="all",
    ),
]
RowsOption = Annotated[
    list[Row] | None,
    typer.Option(
        "--only",
        help="Measure this only; repeatable.",
        show_default="all rows of the chosen --vs",
    ),
]
RivalsOption = Annotated[
    list[Rival] | None,
    typer.Option(
        "--vs",
        help="Compare with RLlib's own runner, with the bare loop over gymnasium's "
        "SyncVectorEnv, which has no policy, or with TorchRL's collector (not on frames); "
        "repeatable.",
        show_default="rllib, bare",
    ),
]
SampledOption = Annotated[
    list[Task] | None,
    typer.Option(
        "--only",
        help="Sample this environment and number of lanes; repeatable.",
        show_default="cartpole-64",
    ),
]
AxesOption = Annotated[
    list[Axis] | None, typer.Option("--only", help="Vary this only; repeatable.")
]
PlotOption = Annotated[Path, typer.Option("--out", metavar="PNG", help="File of the plot.")]


def stepping(
    context: typer.Context,
    vs: PeersOption = None,
    quick: QuickFlag = False,
    only: RowsOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    released_python: ReleasedPython = None,
    dm_env_rpc_python: DmEnvRpcPython = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure how fast environments are stepped at endpoints, and in the process itself.

    vector: 64 lanes of CartPole by shared memory, by TCP and by gRPC. remote: 1 to 128 lanes over
    TCP. evaluation: a function, on one lane over TCP. frames: 84x84x4 uint8 that take 0.1 ms a
    lane, by shared memory. envpool: CartPole as EnvPool has it, 64 and 256 lanes. stragglers: 8
    sessions that do not wait for one another, against 8 that do, and against what the
    environment's mean step would allow. catch: a small game over TCP, for information.
    """
    from benchmarks.stepping.measure import measure

    effort = _QUICK_STEPPING if quick else _STEPPING
    peers = tuple(dict.fromkeys(vs or Peer))
    plan = SteppingPlan(
        rows=tuple(dict.fromkeys(only or rows_of(peers))),
        peers=peers,
        repetitions=repetitions or effort.repetitions,
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
    )
    installed = installations(released_python, dm_env_rpc_python)
    installed.check(plan)
    report = FindingsReport(context.obj, "stepping", asdict(plan), _caveats)
    return report.follow(measure(plan, installed, report.note))


def sampling(
    context: typer.Context,
    vs: RivalsOption = None,
    quick: QuickFlag = False,
    only: SampledOption = None,
    inference: InferencesOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure how fast a runner samples through an endpoint, and RLlib's own without one.

    Two sessions with an endpoint on this machine, each with half of the lanes, in env workers'
    processes of their own and in a shared one, and an algorithm's default module: SAC's on
    Pendulum, else PPO's. There is no learner. All sides run at once, each with a Ray of its own,
    and sample in turns, since the speed of many machines changes from one second to the next. On
    all sides garbage collections leave out what was loaded, as they do in our remote runners. The
    measurement begins when auto has chosen; what it chose is shown.
    """
    from benchmarks.peers import check_extra
    from benchmarks.sampling.measure import measure_sampling

    require_rllib("benchmarks sampling")
    effort = _QUICK_SAMPLING if quick else _SAMPLING
    defaults = SamplingPlan()
    plan = SamplingPlan(
        rivals=tuple(dict.fromkeys(vs or defaults.rivals)),
        tasks=tuple(dict.fromkeys(only or defaults.tasks)),
        inferences=inferences_of(inference, defaults.inferences),
        repetitions=repetitions or effort.repetitions,
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
    )
    if Rival.TORCHRL in plan.rivals:
        check_extra("torchrl", "trainers")
    if Task.HALFCHEETAH_64 in plan.tasks:
        check_extra("mujoco", "trainers")
    used: list[UsedInference] = []

    def finish(_: "Sequence[Finding]") -> dict[str, object]:
        context.obj.facts("inference used", _used_facts(used), [])
        return {"inference": [asdict(each) for each in used]}

    report = FindingsReport(context.obj, "sampling", asdict(plan), _caveats)
    return report.follow(measure_sampling(plan, report.note, used.append), finish)


def _used_facts(used: "Sequence[UsedInference]") -> dict[str, object]:
    """Return by task and inference what was used; several values where repetitions differ."""
    found: dict[str, dict[str, None]] = {}
    for each in used:
        way = "compiled" if each.torch_reason is None else f"torch ({each.torch_reason})"
        found.setdefault(f"{each.task}, {each.inference}", {})[way] = None
    return {case: "; ".join(ways) for case, ways in found.items()}


def profile(
    context: typer.Context,
    only: SampledOption = None,
    inference: InferencesOption = None,
    seconds: SecondsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Profile the runner that sampling measures: its functions, and the time between its events.

    The functions are found by py-spy where it is installed (pip install py-spy) and may look at
    other processes, else by cProfile, with which small functions look more expensive than they are.
    """
    from benchmarks.processes import Process
    from benchmarks.sampling.measure import task_line, task_server

    require_rllib("benchmarks profile")
    plan = SamplingPlan()
    inferences = inferences_of(inference, plan.inferences)
    view = BenchView(context.obj, "profile", {"inferences": inferences})
    found = []

    def measure(task: Task, asked: str) -> None:
        view.now(f"{task}, {asked}")
        command = (sys.executable, "-m", "benchmarks.sampling.profile")
        with task_server(task) as server, Process("the runner", command) as process:
            line = task_line(
                task, "endpoint", server.address, asked, turn_s=seconds or plan.seconds
            )
            process.send(line)
            message = process.receive(2 * (seconds or plan.seconds))
        found.append({"task": task, "inference": asked, **message})
        used = message["torch_reason"] or "runs compiled"
        own = "\n".join(f"{part:6.1%}  {name}" for name, part in message["own_time"])
        spans = "\n".join(
            f"{name:30}" + "".join(f"{value:10,.0f}" for value in values)
            for name, values in message["spans_us"].items()
        )
        facts = {"module": used, f"own time, {message['tool']}": own, "us, p10 p50 p90": spans}
        context.obj.facts(f"{task}, {asked}", facts, [])

    def measure_all() -> None:
        for task in only or plan.tasks:
            for each in inferences:
                measure(task, each)

    is_complete = view.follow(measure_all)
    return view.sum_up(is_complete=is_complete, caveats=[], found={"profiles": found})


def growth(
    context: typer.Context,
    quick: QuickFlag = False,
    only: AxesOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    out: PlotOption = _PLOT,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure how the cost of one vector step grows, and draw it.

    lanes: 1 to 1024. endpoints: 1 to 16. observation: 16 bytes to 1 MiB a lane. Each through
    shared memory, over TCP, and in the process itself; ratios below 1 are in favour of shared
    memory.
    """
    from benchmarks.growth.measure import measure_growth
    from benchmarks.growth.plot import draw, require_matplotlib

    require_matplotlib()
    effort = _QUICK_GROWTH if quick else _GROWTH
    plan = GrowthPlan(
        axes=tuple(dict.fromkeys(only or Axis)),
        is_sparse=quick,
        repetitions=repetitions or effort.repetitions,
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
    )
    report = FindingsReport(context.obj, "growth", asdict(plan), _caveats)

    def finish(findings: "Sequence[Finding]") -> dict[str, object]:
        draw(findings, plan, out)
        context.obj.say(f"plot: {out}")
        return {"plot": str(out)}

    return report.follow(measure_growth(plan, report.note), finish)


def installations(
    released_python: Path | None = None, dm_env_rpc_python: Path | None = None
) -> "Installations":
    """Return where the peers are; by default in this checkout."""
    from benchmarks import peers
    from benchmarks.stepping.measure import Installations

    return Installations(
        released=peers.released(released_python or peers.RELEASED_PYTHON),
        dm_env_rpc=peers.dm_env_rpc(dm_env_rpc_python or peers.DM_ENV_RPC_PYTHON),
        simulators=peers.simulators(),
    )


def _caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
    from benchmarks.report import disturbances

    del findings  # that a client is busy is no fault here: it is what is measured
    return disturbances(measurements)
