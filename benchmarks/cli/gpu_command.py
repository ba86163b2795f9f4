"""``python -m benchmarks gpu``: policies on a GPU."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.cli.findings_view import FindingsReport
from benchmarks.cli.options import QuickFlag, RepetitionsOption, SecondsOption
from benchmarks.gpu.plan import GpuPlan, Network, Workload
from rlmesh_ray.cli.local_ray import require_rllib
from rlmesh_ray.cli.options.common import DebugFlag, JsonFlag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.findings import Finding, Measurement

_MOST_CLIENT_PROCESSES = 8


@dataclass(frozen=True, slots=True)
class _Effort:
    """How long it takes without options."""

    rows: tuple[int, ...]
    clients: tuple[int, ...]
    repetitions: int
    warm_up_s: float
    seconds: float


_THOROUGH = _Effort((1, 8, 32, 128, 512, 2048), (1, 8, 64), 3, 0.2, 0.5)
_QUICK = _Effort((1, 32), (1, 8), 1, 0.1, 0.2)

DeviceOption = Annotated[
    str, typer.Option("--device", metavar="DEVICE", help="As torch names it: cuda, cuda:1 or cpu.")
]
WorkloadsOption = Annotated[
    list[Workload] | None, typer.Option("--only", help="Measure just this; repeatable.")
]
NetworksOption = Annotated[
    list[Network] | None,
    typer.Option("--network", help="Measure just this; repeatable.", show_default="both"),
]
RowsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--rows",
        min=1,
        help="Size of a batch, and of a bucket; repeatable.",
        show_default="1, 8, 32, 128, 512, 2048; quick: 1, 32",
    ),
]
ClientsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--clients",
        min=1,
        help="How many, each with a connection of its own; repeatable.",
        show_default="1, 8, 64; quick: 1, 8",
    ),
]
CompileFlag = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Measure compiled networks, too.")
]
ThreadsOption = Annotated[
    int,
    typer.Option("--torch-threads", min=1, help="Of each process that runs a network."),
]


def gpu(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    device: DeviceOption = "cuda",
    quick: QuickFlag = False,
    only: WorkloadsOption = None,
    network: NetworksOption = None,
    rows: RowsOption = None,
    clients: ClientsOption = None,
    compile_networks: CompileFlag = True,
    torch_threads: ThreadsOption = 1,
    repetitions: RepetitionsOption = None,
    seconds: SecondsOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> int:
    """Measure the serving of policies on a GPU: a 4-64-64-2 network, and a convolutional one.

    batches: 1 to 2048 rows at once, through a policy as it is, with buckets and compiled, and
    through a ModelServer with one client, beside a plain loop of torch on the same device. clients:
    1 to 64 of one row each, beside a ModelServer on the CPU. Comparisons of rates above 1 and of
    times below 1 are in favour of the first.
    """
    require_rllib("bench gpu", ["torch"])
    from benchmarks.gpu.measure import measure_gpu
    from benchmarks.machine import usable_cores

    effort = _QUICK if quick else _THOROUGH
    plan = GpuPlan(
        device=device,
        workloads=tuple(dict.fromkeys(only or Workload)),
        networks=tuple(dict.fromkeys(network or Network)),
        rows=tuple(sorted(set(rows or effort.rows))),
        clients=tuple(sorted(set(clients or effort.clients))),
        client_processes=min(_MOST_CLIENT_PROCESSES, max(1, len(usable_cores()) // 2)),
        compiles=compile_networks,
        torch_threads=torch_threads,
        repetitions=repetitions or effort.repetitions,
        warm_up_s=effort.warm_up_s,
        seconds=seconds or effort.seconds,
    )
    name = _name_of(device)
    report = FindingsReport(context.obj, "gpu", {**asdict(plan), "device_name": name}, _caveats)
    context.obj.say(f"device {device}: {name}")
    return report.follow(measure_gpu(plan, report.note))


def _name_of(device: str) -> str:
    """Return the model of a device and what runs on it.

    Raises:
        ConfigurationError: It is not available; the message has the remedy.
    """
    import torch

    from benchmarks.machine import describe
    from rlmesh_ray.models.torch.module import torch_device

    if torch_device(device).type == "cpu":
        return f"{describe().cpu}, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"


def _caveats(findings: "Sequence[Finding]", measurements: "Sequence[Measurement]") -> list[str]:
    from benchmarks.report import disturbances

    del findings  # a busy client is part of what is measured
    return disturbances(measurements)
