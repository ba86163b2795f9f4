"""Where scaling was measured, and what one should know before one believes it."""

from collections.abc import Sequence
from statistics import median

from rich.table import Table

from benchmarks.findings import Measurement
from benchmarks.machine import usable_cores
from benchmarks.report import disturbances
from benchmarks.scaling.listener import Placed
from benchmarks.scaling.plan import Part, ScalingPlan, Setup

_BUSY_RUNNER = 0.8
_BUSY_MACHINE = 0.9


def places(placed: Sequence[Placed]) -> Table:
    """Return a line for each measurement: the load before, and where its endpoints were."""
    made = Table(title="where", title_justify="left", title_style="bold")
    made.add_column("", no_wrap=True)
    for name in ("repetition", "load before", "nodes", "endpoints on them", "start of them",
                 "of runners"):  # fmt: skip
        made.add_column(name, justify="right")
    for each in placed:
        made.add_row(
            each.case,
            str(each.repetition + 1),
            f"{each.load_average:.1f}",
            str(each.num_nodes),
            "+".join(map(str, each.endpoints_by_node)),
            f"{each.endpoints_s:.1f} s",
            f"{each.runners_s:.1f} s",
        )
    return made


def caveats(
    placed: Sequence[Placed], measurements: Sequence[Measurement], plan: ScalingPlan
) -> list[str]:
    """Return what makes the rates less than they seem; each as a sentence."""
    found = disturbances(measurements)
    setups = {setup.case: setup for setup in plan.setups if Part.RATES in plan.parts}
    if any(setup.num_nodes and setup.num_nodes > 1 for setup in setups.values()):
        found.append(
            "several nodes are several of Ray's on this one machine: what a network takes is not "
            "in it, and all share its cores"
        )
    found += _of_cores(measurements)
    for case, setup in setups.items():
        own = [each for each in placed if each.case == case]
        found += _of_place(setup, own)
    modes = {each.one_by_one for each in placed if each.one_by_one is not None}
    found += [f"runners do not take the fast path: {why}" for why in sorted(modes)]
    return found


def _of_place(setup: Setup, placed: Sequence[Placed]) -> list[str]:
    if setup.num_nodes is None:
        return []
    wanted = min(setup.num_nodes, setup.num_endpoints)
    fewest = min((len(each.endpoints_by_node) for each in placed), default=wanted)
    if fewest == wanted:
        return []
    return [f"{setup.case}: Ray put the endpoints on {fewest} node(s), asked for were {wanted}"]


def _of_cores(measurements: Sequence[Measurement]) -> list[str]:
    by_case: dict[str, list[Measurement]] = {}
    for each in measurements:
        by_case.setdefault(each.case, []).append(each)
    busy = [
        case
        for case, group in by_case.items()
        if median(max(each.client_cores) for each in group) >= _BUSY_RUNNER
    ]
    full = [
        case
        for case, group in by_case.items()
        if _all(group) >= _BUSY_MACHINE * len(usable_cores())
    ]
    found = []
    if busy:
        found.append(
            f"a runner kept {_BUSY_RUNNER:.0%} of a core busy or more, and is the limit itself, "
            f"in: {'; '.join(busy)}"
        )
    if full:
        found.append(
            f"the machine had no core left, which is a limit that endpoints do not have "
            f"elsewhere, in: {'; '.join(full)}"
        )
    return found


def _all(group: Sequence[Measurement]) -> float:
    """Return how many cores were busy with anything, in the median."""
    return median(
        (each.server_cores or 0.0) + sum(each.client_cores) + (each.other_cores or 0.0)
        for each in group
    )
