"""How fast policies are served: messages, rows, latency, many clients, a single one.

The policy is a 4-64-64-2 network. Servers are fresh in every repetition, but for latency, which is
measured once and for long. Messages and a single client are measured with ordinary clients, which
ask all servers by turns of a quarter second; the others with raw ones (``closed_loop_client``,
``open_loop_client``), and there the servers take turns in going first.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.findings import Finding, Goal
from benchmarks.processes import Server
from benchmarks.record import ROUND_TRIP, Note, Record, by_turns, ratios
from benchmarks.serving.plan import ClientKind, Plan, Side, Workload
from benchmarks.serving.targets import NOOP_STYLES, Bench, Task, client_command
from benchmarks.statistics import Percentiles, Spread, percentiles, ratio

LAG = "client's lag, p99"
"""How late the open loop itself was; a case."""
TWO_CLIENTS = "2 / 1 processes"
"""What a second client process gets out of a no-op server; a comparison."""

_RATE = "messages/s"
_LOAD = 0.7
"""Part of the capacity at which requests arrive in the open loop."""


@dataclass(frozen=True, slots=True)
class _Case:
    name: str
    task: Task
    goal: Goal | None = None
    """Of the ratio to the no-op server."""
    released_goal: Goal | None = None
    """Of the blocking client's ratio to the released rlmesh."""
    released_cost: float | None = None
    """Likewise of the servers' processor time a prediction; at most."""


_NOOP_GOAL = Goal("/ noop >= 0.7", 0.7)


def _beside_released(limit: float) -> Goal:
    return Goal(f"/ {Side.RELEASED} >= {limit:g}", limit)


_MESSAGES = (
    _Case("1 route", Task(1)),
    _Case("8 routes", Task(8), _NOOP_GOAL, _beside_released(2.0), released_cost=0.7),
    _Case("32 routes", Task(32), _NOOP_GOAL, _beside_released(3.0), released_cost=0.5),
    _Case("8 routes in one stream", Task(8, is_one_stream=True), None, _beside_released(1.3)),
    _Case("32 routes in one stream", Task(32, is_one_stream=True), None, _beside_released(1.5)),
)
_ROWS = (_Case("32 routes of 32 rows", Task(32, rows=32)),)
_ROWS_GOAL = _beside_released(2.5)
_PERCENTILES = {"p50": "p50", "p90": "p90", "p99": "p99", "p99.9": "p999", "worst": "worst"}
_LATENCY_GOAL = Goal("/ noop <= 1.5", 1.5, is_ceiling=True)
_CLIENTS = (64, 128, 256)
_CLIENT_PROCESSES = 2
_CLIENTS_GOAL = Goal("/ 64 clients >= 0.95", 0.95)
_SINGLE_GOAL = Goal("released / ours >= 1.15", 1.15)
_SINGLE_COST = 1.0
"""Of the server's processor time a prediction, beside the released rlmesh; at most."""
_COST = "us CPU"


def measure(plan: Plan, bench: Bench, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one workload after the other.

    Args:
        plan: What to measure.
        bench: How processes are run; the style of the no-op server is chosen here.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A server or client failed, or answered with anything but predictions.
        ConfigurationError: A rival is not installed; nothing has been measured then.
    """
    for rival in plan.rivals:
        bench.check(rival)
    for kind in plan.lone_clients:
        client_command(kind)
    if {Side.NOOP, Side.NOOP_UVLOOP} & set(plan.rivals) and set(plan.workloads) != {
        Workload.SINGLE
    }:
        style, findings = _faster_noop(plan, bench, note)
        yield findings
        bench = replace(bench, noop_style=style)
    for workload, measured in (
        (Workload.MESSAGES, _messages),
        (Workload.ROWS, _rows),
        (Workload.LATENCY, _latency),
        (Workload.CLIENTS, _clients),
        (Workload.SINGLE, _single),
    ):
        if workload in plan.workloads:
            yield list(measured(plan, bench, note))


# --- the instrument itself -------------------------------------------------------------


def _faster_noop(plan: Plan, bench: Bench, note: Note) -> tuple[str, list[Finding]]:
    """Find out which of the two ways to write the no-op server is the better one.

    Each is asked by one client process and by two: where two get more, one is the limit.
    """
    record = Record("no-op server", note)
    names = {1: "1 client process", 2: "2 client processes"}
    for repetition in range(plan.repetitions):
        for style in by_turns(NOOP_STYLES, repetition):
            with replace(bench, noop_style=style).start(Side.NOOP) as server:
                for processes, name in names.items():
                    reading = bench.put(server, Side.NOOP, Task(32, client_processes=processes))
                    record.add(style, name, repetition, reading.answers_per_s, _RATE, reading)
    findings, medians = [], {}
    for style in NOOP_STYLES:
        sides = record.sides(style)
        one, two = sides.values()
        medians[style] = one.median
        gain = {TWO_CLIENTS: ratio(two, one)}
        findings.append(Finding("no-op server", style, _RATE, sides, gain))
    return max(medians, key=medians.__getitem__), findings


# --- closed loop -----------------------------------------------------------------------


def _throughput(
    workload: Workload, cases: Sequence[_Case], plan: Plan, bench: Bench, note: Note
) -> Record:
    """Let all sides do all cases: rows a second, which are messages where a message has one."""
    record = Record(workload, note)
    unit = _RATE if workload is not Workload.ROWS else "lane-predictions/s"
    for repetition in range(plan.repetitions):
        for side in by_turns((Side.OURS, *plan.rivals), repetition):
            with bench.start(side) as server:
                for case in cases:
                    reading = bench.put(server, side, case.task)
                    value = reading.answers_per_s * case.task.rows
                    record.add(case.name, side, repetition, value, unit, reading)
    return record


def _messages(plan: Plan, bench: Bench, note: Note) -> Iterator[Finding]:
    """Ordinary clients ask all servers by turns.

    The goals of the blocking client are those beside the released rlmesh.
    """
    is_blocking = plan.client is ClientKind.BLOCKING
    workload = f"{Workload.MESSAGES}, blocking client" if is_blocking else Workload.MESSAGES
    record = Record(workload, note)
    for repetition in range(plan.repetitions):
        with _side_by_side(plan, bench) as servers:
            for case in _MESSAGES:
                for side, reading in bench.take_turns(servers, plan.client, case.task).items():
                    record.add(case.name, side, repetition, reading.answers_per_s, _RATE, reading)
    for case in _MESSAGES:
        sides = record.sides(case.name)
        by_rival = ratios(sides)
        goal, judged = case.goal, by_rival.get(f"/ {Side.NOOP}")
        if is_blocking:
            goal, judged = case.released_goal, by_rival.get(f"/ {Side.RELEASED}")
        yield Finding(workload, case.name, _RATE, sides, by_rival, goal, judged)
        if is_blocking and case.released_cost is not None:
            yield from _server_cost(workload, case.name, sides, case.released_cost)


@contextmanager
def _side_by_side(plan: Plan, bench: Bench) -> Iterator[dict[Side, Server]]:
    """Start a server of each side, all at once; end them."""
    with ExitStack() as stack:
        yield {side: stack.enter_context(bench.start(side)) for side in (Side.OURS, *plan.rivals)}


def _server_cost(
    workload: str, case: str, sides: Mapping[str, Spread], limit: float
) -> Iterator[Finding]:
    """Yield a line with the servers' processor time, where the system reports it."""
    costs = {name: Spread(each.server_cpu_us) for name, each in sides.items() if each.server_cpu_us}
    if len(costs) == len(sides):
        by_rival = ratios(costs)
        released = f"/ {Side.RELEASED}"
        goal = Goal(f"{released} <= {limit:g}", limit, is_ceiling=True)
        judged = by_rival.get(released)
        yield Finding(workload, f"{case}, server", _COST, costs, by_rival, goal, judged)


def _rows(plan: Plan, bench: Bench, note: Note) -> Iterator[Finding]:
    record = _throughput(Workload.ROWS, _ROWS, plan, bench, note)
    for case in _ROWS:
        sides = record.sides(case.name)
        unit, by_rival = "lane-predictions/s", ratios(sides)
        judged = by_rival.get(f"/ {Side.RELEASED}")
        yield Finding(Workload.ROWS, case.name, unit, sides, by_rival, _ROWS_GOAL, judged)


def _clients(plan: Plan, bench: Bench, note: Note) -> Iterator[Finding]:
    cases = [
        _Case(
            f"{count} clients",
            Task(count, has_connection_each=True, client_processes=_CLIENT_PROCESSES),
        )
        for count in _CLIENTS
    ]
    record = _throughput(Workload.CLIENTS, cases, plan, bench, note)
    fewest = record.sides(cases[0].name)[Side.OURS]
    for case in cases:
        sides = record.sides(case.name)
        kept = ratio(sides[Side.OURS], fewest)
        comparisons = {**ratios(sides), f"/ {cases[0].name}": kept}
        goal = _CLIENTS_GOAL if case is cases[-1] else None
        yield Finding(Workload.CLIENTS, case.name, _RATE, sides, comparisons, goal, kept)


def _single(plan: Plan, bench: Bench, note: Note) -> Iterator[Finding]:
    """One client after the other, each alone at every server with one request in flight."""
    record = Record(Workload.SINGLE, note)
    p90_us: dict[tuple[ClientKind, str], list[float]] = {}
    for repetition in range(plan.repetitions):
        with _side_by_side(plan, bench) as servers:
            for kind in plan.lone_clients:
                for side, reading in bench.take_turns(servers, kind, Task(1)).items():
                    waited = percentiles(reading.latencies_us)
                    record.add(kind, side, repetition, waited.p50, ROUND_TRIP, reading)
                    p90_us.setdefault((kind, side), []).append(waited.p90)
    for kind in plan.lone_clients:
        sides = record.sides(kind)
        # Processor time has lines of its own.
        round_trips = {side: Spread(each.values) for side, each in sides.items()}
        comparisons, judged = ratios(round_trips), None
        if Side.RELEASED in sides:
            judged = ratio(sides[Side.RELEASED], sides[Side.OURS])
            comparisons["released / ours"] = judged
        p90 = {side: Spread(tuple(p90_us[kind, side])) for side in sides}
        yield Finding(
            Workload.SINGLE, kind, ROUND_TRIP, round_trips, comparisons, _SINGLE_GOAL, judged
        )
        yield Finding(Workload.SINGLE, f"{kind}, p90", ROUND_TRIP, p90, ratios(p90))
        yield from _server_cost(Workload.SINGLE, kind, sides, _SINGLE_COST)
        clients = {
            side: Spread(tuple(map(operator.sub, each.cpu_us, each.server_cpu_us)))
            for side, each in sides.items()
            if each.server_cpu_us
        }
        if len(clients) == len(sides):
            yield Finding(Workload.SINGLE, f"{kind}, client", _COST, clients, ratios(clients))


# --- open loop -------------------------------------------------------------------------


def _latency(plan: Plan, bench: Bench, note: Note) -> Iterator[Finding]:
    """Measure what this package can do, then let less than that arrive, at every side alike.

    The others get as large a part of their own capacity, too: one that can do twice as much is
    half as busy with the same arrivals, and gets through moments in which the machine is slow.

    The released server is no side: it takes small frames that come faster than it answers for an
    attack and ends the connection (GOAWAY, too_many_data_frames).
    """
    record = Record(Workload.LATENCY, note)
    waited: dict[str, list[Percentiles]] = {}
    lags: dict[str, list[Percentiles]] = {}
    our_load = 0.0
    rivals = [side for side in plan.rivals if side is not Side.RELEASED]
    for repetition, side in product(range(plan.repetitions), (Side.OURS, *rivals)):
        with bench.start(side) as server:
            capacity = bench.put(server, side, Task(32))
            record.add("capacity", side, repetition, capacity.answers_per_s, _RATE, capacity)
            own_load = _LOAD * capacity.answers_per_s
            if side is Side.OURS:
                our_load, loads = own_load, {str(side): own_load}
            else:
                loads = {str(side): our_load, f"{side}, own load": own_load}
            for name, arrivals_per_s in loads.items():
                task = Task(32, arrivals_per_s=arrivals_per_s, seconds=plan.latency_s)
                reading = bench.put(server, side, task)
                record.add("answered", name, repetition, reading.answers_per_s, _RATE, reading)
                waited.setdefault(name, []).append(percentiles(reading.latencies_us))
                lags.setdefault(name, []).append(percentiles(reading.lags_us))
    for case in ("capacity", "answered"):
        yield Finding(Workload.LATENCY, case, _RATE, record.sides(case))
    for name, field in _PERCENTILES.items():
        sides = _only(waited, field)
        goal = _LATENCY_GOAL if field == "p99" else None
        waits = ratios(sides)
        beside = waits.get(f"/ {Side.NOOP}")
        yield Finding(Workload.LATENCY, name, ROUND_TRIP, sides, waits, goal, beside)
    yield Finding(Workload.LATENCY, LAG, ROUND_TRIP, _only(lags, "p99"))


def _only(sides: Mapping[str, Sequence[Percentiles]], field: str) -> dict[str, Spread]:
    return {
        side: Spread(tuple(getattr(each, field) for each in marks)) for side, marks in sides.items()
    }
