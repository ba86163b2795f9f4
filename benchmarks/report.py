"""Tables for people, and what they should know before they believe them."""

from collections.abc import Iterable, Sequence
from statistics import median

from rich.table import Table
from rich.text import Text

from benchmarks.findings import Finding, Measurement
from benchmarks.machine import Machine
from benchmarks.serving.measure import LAG, TWO_CLIENTS
from benchmarks.statistics import Spread

_BUSY_CLIENT = 0.9
_NOTABLE_GAIN = 1.1
_NOTABLE_LAG_US = 1_000
_NOTABLE_OTHERS = 0.1


def machine_facts(machine: Machine) -> dict[str, object]:
    """Return the machine, for people."""
    return {
        "date": machine.date,
        "processor": f"{machine.cpu}, {machine.cores} cores",
        "system": machine.system,
        "python": machine.python,
        "packages": ", ".join(f"{name} {found}" for name, found in machine.packages.items()),
        "load before": "not known" if machine.load_average is None else machine.load_average,
    }


def table(findings: Sequence[Finding]) -> Table:
    """Return the findings of one workload: medians, and below them quartiles and processor time."""
    sides = _union(finding.sides for finding in findings)
    comparisons = _union(finding.comparisons for finding in findings)
    units = _union([finding.unit] for finding in findings)
    has_goals = any(finding.goal for finding in findings)
    title = findings[0].workload if len(units) > 1 else f"{findings[0].workload}, {units[0]}"
    made = Table(title=title, title_justify="left", title_style="bold")
    made.add_column("")
    for name in (*sides, *comparisons):
        made.add_column(name, justify="right")
    if has_goals:
        made.add_column("goal", no_wrap=True)
    for finding in findings:
        made.add_row(
            finding.case if len(units) == 1 else f"{finding.case} ({finding.unit})",
            *(_shown(finding.sides.get(side)) for side in sides),
            *(_shown(finding.comparisons.get(name)) for name in comparisons),
            *([_goal(finding)] if has_goals else []),
        )
    return made


def cores(measurements: Sequence[Measurement]) -> Table:
    """Return how many cores were busy with what, in the median."""
    made = Table(title="busy cores", title_justify="left", title_style="bold")
    made.add_column("", no_wrap=True)
    made.add_column("side", no_wrap=True)
    for name in ("server", "clients", "others"):
        made.add_column(name, justify="right")
    for key, group in _grouped(measurements).items():
        made.add_row(
            f"{key[0]}, {key[1]}",
            key[2],
            _median(each.server_cores for each in group),
            _median(sum(each.client_cores) for each in group),
            _median(each.other_cores for each in group),
        )
    return made


def disturbances(measurements: Sequence[Measurement]) -> list[str]:
    """Return what else kept the machine busy; each as a sentence."""
    found = []
    others = [each.other_cores for each in measurements if each.other_cores is not None]
    if others and median(others) > _NOTABLE_OTHERS:
        found.append(
            f"other programs kept {median(others):.1f} cores busy (median; up to "
            f"{max(others):.1f}): repeat on a quiet machine"
        )
    return found


def caveats(findings: Sequence[Finding], measurements: Sequence[Measurement]) -> list[str]:
    """Return what makes the figures of serving less than they seem; each as a sentence."""
    found = disturbances(measurements)
    at_limit = [
        f"{workload}, {case} ({side})"
        for (workload, case, side), group in _grouped(measurements).items()
        if median(max(each.client_cores) for each in group) >= _BUSY_CLIENT
    ]
    if at_limit:
        found.append(
            f"a client process was busy for {_BUSY_CLIENT:.0%} of the time or more, and may be "
            f"the limit itself, in: {'; '.join(at_limit)}"
        )
    gain = _gain_of_two_clients(findings)
    if gain > _NOTABLE_GAIN:
        found.append(
            f"two client processes get {gain:.2f} times as much out of the no-op server as one: "
            "repeat with --client-processes 2"
        )
    for finding in findings:
        if finding.case == LAG:
            found += [
                f"the client itself was late: {spread.median / 1000:.1f} ms at p99 ({side}), which "
                "the latencies contain"
                for side, spread in finding.sides.items()
                if spread.median > _NOTABLE_LAG_US
            ]
    return found


def _gain_of_two_clients(findings: Sequence[Finding]) -> float:
    """Return what matters of the no-op servers: the gain of the faster one."""
    styles = [finding for finding in findings if TWO_CLIENTS in finding.comparisons]
    if not styles:
        return 1.0
    fastest = max(styles, key=lambda style: next(iter(style.sides.values())).median)
    return fastest.comparisons[TWO_CLIENTS].median


def _union(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for each in names for name in each))


def _grouped(
    measurements: Sequence[Measurement],
) -> dict[tuple[str, str, str], list[Measurement]]:
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for each in measurements:
        groups.setdefault((each.workload, each.case, each.side), []).append(each)
    return groups


def _median(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f}" if known else ""


def _shown(spread: Spread | None) -> Text:
    if spread is None:
        return Text("")
    lines: list[str | tuple[str, str]] = [_number(spread.median)]
    if len(spread.values) > 1:
        low, high = spread.quartiles
        lines += ["\n", (f"[{_number(low)}, {_number(high)}]", "dim")]
    if spread.cpu_us:
        lines += ["\n", f"{_number(median(spread.cpu_us))} us CPU"]
    if spread.server_cpu_us and any(spread.server_cpu_us):
        lines += ["\n", (f"server {_number(median(spread.server_cpu_us))}", "dim")]
    return Text.assemble(*lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _goal(finding: Finding) -> Text:
    if finding.goal is None or finding.is_met is None:
        return Text("")
    mark, style = ("✓", "green") if finding.is_met else ("✗", "red")
    return Text(f"{mark} {finding.goal.text}", style=style)
