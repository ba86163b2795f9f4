"""``python -m benchmarks``: how fast it is on this machine, against what one would use instead.

Every subject is a command of its own. A new one needs a generator of findings in ``bench``, a
command here, and a line in ``everything``.
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from benchmarks.cli.calls_command import calls
from benchmarks.cli.checkouts_command import checkouts
from benchmarks.cli.env_commands import growth, installations, profile, sampling, stepping
from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.gpu_command import gpu
from benchmarks.cli.learning_view import LearningReport
from benchmarks.cli.options import (
    LearningInferencesOption,
    QuickFlag,
    ReleasedPython,
    RepetitionsOption,
    SecondsOption,
    inferences_of,
)
from benchmarks.cli.recording_command import recording
from benchmarks.cli.robots_command import robots
from benchmarks.cli.scaling_commands import scaling
from benchmarks.cli.watching_command import watching
from benchmarks.cli.weights_command import weights
from benchmarks.learning.plan import LearningPlan, Task
from benchmarks.sampling.plan import Rival as SamplingRival
from benchmarks.serving.plan import ClientKind, Plan, Side, Workload
from benchmarks.stepping.plan import Peer, SteppingPlan, rows_of
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.main import ReadableCommand, ReadableCommandGroup
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from benchmarks.findings import Finding, Measurement

T = TypeVar("T", bound=enum.StrEnum)

app = typer.Typer(cls=ReadableCommandGroup, add_completion=False, pretty_exceptions_enable=False)


class Rival(enum.StrEnum):
    """Peers to compare with; some of ``Side``."""

    NOOP = Side.NOOP.value
    NOOP_UVLOOP = Side.NOOP_UVLOOP.value
    RELEASED = Side.RELEASED.value
    RAY_SERVE = Side.RAY_SERVE.value


class ManyRoutesClient(enum.StrEnum):
    """Clients of many routes; some of ``ClientKind``."""

    ASYNCIO = ClientKind.ASYNCIO.value
    BLOCKING = ClientKind.BLOCKING.value


class AnyRival(enum.StrEnum):
    """Peers to compare with in any subject."""

    NOOP = Rival.NOOP.value
    NOOP_UVLOOP = Rival.NOOP_UVLOOP.value
    RELEASED = Rival.RELEASED.value
    RAY_SERVE = Rival.RAY_SERVE.value
    RLLIB = SamplingRival.RLLIB.value
    BARE = SamplingRival.BARE.value
    TORCHRL = SamplingRival.TORCHRL.value
    SYNC = Peer.SYNC.value
    ASYNC = Peer.ASYNC.value
    DM_ENV_RPC = Peer.DM_ENV_RPC.value
    ENVPOOL = Peer.ENVPOOL.value
    GRPC = Peer.GRPC.value


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long it takes by default."""

    repetitions: int
    warm_up_s: float
    seconds: float
    latency_s: float


_THOROUGH = _Effort(repetitions=5, warm_up_s=0.5, seconds=2.0, latency_s=60.0)
_QUICK = _Effort(repetitions=1, warm_up_s=0.2, seconds=0.5, latency_s=3.0)
_CURVES = Path("runs/bench/learning.png")

VsOption = Annotated[
    list[Rival] | None,
    typer.Option(
        "--vs",
        help="Compare with a grpc.aio server that does nothing (noop, the default), with that on "
        "uvloop, with the released rlmesh, or with Ray Serve; repeatable.",
    ),
]
AnyRivalOption = Annotated[
    list[AnyRival] | None,
    typer.Option(
        "--vs",
        help="Compare with these only, in the subjects that have them; repeatable. The help of "
        "each subject lists them.",
        show_default="each subject's own",
    ),
]
OnlyOption = Annotated[
    list[Workload] | None, typer.Option("--only", help="Measure this only; repeatable.")
]
LatencySecondsOption = Annotated[
    float | None,
    typer.Option(
        "--latency-seconds",
        min=0.05,
        help="Duration of the arrivals, for latency.",
        show_default="60",
    ),
]
ClientOption = Annotated[
    ManyRoutesClient,
    typer.Option("--client", help="Of messages: grpc.aio, or grpcio's ordinary blocking client."),
]
ClientProcessesOption = Annotated[
    int,
    typer.Option(
        "--client-processes", min=1, help="Client processes over which the routes are spread."
    ),
]
PinFlag = Annotated[
    bool,
    typer.Option(
        "--pin", help="Give the server a core of its own, and its clients the other ones (Linux)."
    ),
]

TasksOption = Annotated[
    list[Task] | None,
    typer.Option(
        "--only",
        help="Learn this task only; repeatable.",
        show_default=f"all; with --curves {Task.PPO_CARTPOLE} and {Task.SAC_PENDULUM_SMALL}",
    ),
]
SeedsOption = Annotated[
    int, typer.Option("--seeds", min=1, help="How many seeds; each side learns with all of them.")
]
JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs", min=1, help="Runs at a time, which changes their seconds, but not their steps."
    ),
]
CurvesFlag = Annotated[
    bool,
    typer.Option(
        "--curves",
        help="Learn for a fixed number of env steps, beyond the threshold, and draw the mean of "
        "all seeds with its 95 % interval, which a bootstrap finds.",
    ),
]
CurvesPlotOption = Annotated[
    Path, typer.Option("--out", metavar="PNG", help="File of the plot of --curves.")
]
FirstSeedOption = Annotated[int, typer.Option("--seed", help="The first seed.")]
KillsOption = Annotated[
    int, typer.Option("--kills", min=1, help="How many endpoints to kill, at random moments.")
]
MostStepsOption = Annotated[
    int | None,
    typer.Option(
        "--most-steps",
        min=1,
        help="Give up, or end the curve, after this many env steps.",
        show_default="each task's own",
    ),
]


@app.callback(invoke_without_command=True)
def everything(
    context: typer.Context,
    vs: AnyRivalOption = None,
    quick: QuickFlag = False,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int | None:
    """Measure on this machine, everything or one subject: ratios inside one run, with quartiles.

    Each side runs in fresh processes, in turns. Below a rate stands the processor time of a step or
    message, of clients, servers and what they start. Other programs disturb: their processor
    time is shown.
    """
    if context.invoked_subcommand is None:
        return _everything(context, vs, quick=quick)
    if vs or quick:
        raise typer.BadParameter(f"options stand after {context.invoked_subcommand}")
    return None


def _everything(context: typer.Context, vs: list[AnyRival] | None, *, quick: bool) -> int:
    """Measure subject after subject, until one is interrupted; return the last exit code."""
    peers, runners, rivals = _known(Peer, vs), _known(SamplingRival, vs), _known(Rival, vs)
    # Missing packages are named before anything is measured.
    require_rllib("python -m benchmarks")
    chosen = tuple(peers or (Peer if vs is None else ()))
    installations().check(SteppingPlan(rows=rows_of(chosen), peers=chosen))
    # Tasks that take minutes; the other ones take hours, and run on request.
    tasks = [Task.PPO_CATCH] if quick else [Task.PPO_CATCH, Task.PPO_CARTPOLE]
    code = 0
    if vs is None or runners:
        code = sampling(context, vs=runners, quick=quick)
    if vs is None or peers:
        code = code or stepping(context, vs=peers, quick=quick)
    if vs is None or rivals:
        code = code or serving(context, vs=rivals or [Rival.NOOP, Rival.RELEASED], quick=quick)
    if vs is None:
        code = code or growth(context, quick=quick)
        code = code or robots(context, quick=quick)
        code = code or recording(context, quick=quick)
    return code or learning(context, only=tasks)


def _known(kind: type[T], names: Iterable[str] | None) -> list[T] | None:
    """Return the members of ``kind`` among ``names``; None where no names are given."""
    if names is None:
        return None
    values = {each.value: each for each in kind}
    return [values[str(name)] for name in names if str(name) in values]


app.command(cls=ReadableCommand)(sampling)
app.command(cls=ReadableCommand)(profile)
app.command(cls=ReadableCommand)(stepping)
app.command(cls=ReadableCommand)(growth)
app.command(cls=ReadableCommand)(scaling)
app.command(cls=ReadableCommand)(gpu)
app.command(cls=ReadableCommand)(robots)
app.command(cls=ReadableCommand)(watching)
app.command(cls=ReadableCommand)(weights)
app.command(cls=ReadableCommand)(calls)
app.command(cls=ReadableCommand)(checkouts)
app.command(cls=ReadableCommand)(recording)


@app.command(cls=ReadableCommand)
def serving(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    vs: VsOption = None,
    quick: QuickFlag = False,
    only: OnlyOption = None,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    latency_seconds: LatencySecondsOption = None,
    client: ClientOption = ManyRoutesClient.ASYNCIO,
    client_processes: ClientProcessesOption = 1,
    pin: PinFlag = False,
    released_python: ReleasedPython = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure the serving of policies, with a 4-64-64-2 network.

    messages: Predicts a second of 1, 8 and 32 routes. rows: lanes a second, 32 routes of 32.
    latency: requests that arrive at random, at 70 % of our capacity, and at the others at 70 % of
    theirs, too (not at the released rlmesh, which ends such connections). clients: 64 to 256.
    single: the round trip of a client that is alone, and the processor time of both ends: grpcio's
    blocking client, grpc.aio, and JavaScript where its packages are installed.
    """
    from benchmarks.peers import RELEASED_PYTHON
    from benchmarks.report import caveats
    from benchmarks.serving.measure import measure
    from benchmarks.serving.targets import Bench, installed_clients

    effort = _QUICK if quick else _THOROUGH
    plan = Plan(
        workloads=tuple(dict.fromkeys(only or Workload)),
        rivals=tuple(Side(rival.value) for rival in dict.fromkeys(vs or [Rival.NOOP])),
        client=ClientKind(client.value),
        lone_clients=installed_clients(),
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
    settings = {**asdict(plan), **asdict(bench)}
    missing = set(ClientKind) - set(plan.lone_clients) if Workload.SINGLE in plan.workloads else ()
    left_out = [
        f"there is no {kind} client: make examples/javascript/node_modules/.ready installs it"
        for kind in missing
    ]

    def doubts(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
        return [*caveats(findings, measurements), *left_out]

    report = FindingsReport(context.obj, "serving", settings, doubts)
    return report.follow(measure(plan, bench, report.note))


@app.command(cls=ReadableCommand)
def learning(
    context: typer.Context,
    only: TasksOption = None,
    inference: LearningInferencesOption = None,
    seeds: SeedsOption = 1,
    seed: FirstSeedOption = 1,
    most_steps: MostStepsOption = None,
    curves: CurvesFlag = False,
    out: CurvesPlotOption = _CURVES,
    jobs: JobsOption = 1,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Learn through endpoints and with RLlib's own runner, and compare the steps that it took.

    The same config and seed on all sides, to the thresholds of RLlib's tuned examples. PPO's
    curves in torch are the same, to the last digit; compiled, other actions are drawn. DQN and SAC
    draw from a replay buffer that RLlib does not seed, and APPO and IMPALA learn what comes first:
    there, compare several seeds. All of it takes hours on two cores, ppo-catch and ppo-cartpole
    some minutes.
    """
    from benchmarks.growth.plot import require_matplotlib
    from benchmarks.learning.measure import compare

    require_rllib("benchmarks learning")
    if curves:
        require_matplotlib()
    defaults = (Task.PPO_CARTPOLE, Task.SAC_PENDULUM_SMALL) if curves else tuple(Task)
    plan = LearningPlan(
        tasks=tuple(dict.fromkeys(only or defaults)),
        inferences=inferences_of(inference, LearningPlan().inferences),
        seeds=seeds,
        first_seed=seed,
        most_steps=most_steps,
        is_whole_curve=curves,
        jobs=jobs,
    )
    report = LearningReport(context.obj, plan, out)
    return report.follow(compare(plan, report.note))


@app.command(cls=ReadableCommand)
def recovery(
    context: typer.Context,
    kills: KillsOption = 20,
    seed: FirstSeedOption = 1,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Kill an endpoint while a runner samples from it, and time how soon it samples again.

    Both are actors of a local Ray, which restarts the endpoint; the runner must not be restarted.
    """
    from benchmarks.cli.recovery_view import measure_recovery

    require_rllib("benchmarks recovery")
    return measure_recovery(context.obj, kills, seed)
