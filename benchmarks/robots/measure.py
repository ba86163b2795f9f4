"""What a policy of 20 ms does to the pace of a simulator, and what it gives to eight clients.

Every measurement has fresh processes; the sides of a row take turns in going first.
"""

import sys
from collections.abc import Callable, Iterator, Mapping

from benchmarks.findings import Finding, Goal
from benchmarks.load import ClientJob, Load
from benchmarks.processes import Reading, Server, measure
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.robots.driver import DriverJob, Mode
from benchmarks.robots.plan import RobotsPlan, Row
from benchmarks.robots.policy import HORIZON

OURS = "rlmesh-ray"
SIMULATOR, POLICY = "simulator alone", "policy alone"

_CHUNKS_GOAL = Goal(f"/ {SIMULATOR} >= 0.95", 0.95)
_BATCHED_GOAL = Goal(f"/ {POLICY} >= 0.9", 0.9)
_CLIENTS = 8

Measured = Callable[[], Reading]


def measure_robots(plan: RobotsPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        EndpointError: A process failed; there is no number.
    """
    rows = {Row.CHUNKS: _chunks, Row.BATCHED: _batched}
    for row, measured in rows.items():
        if row in plan.rows:
            yield list(measured(plan, note))


def _chunks(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Return how much of its own rate a simulator keeps."""
    cases = {
        "one action a request": (1, Mode.ONE_ACTION),
        f"chunks of {HORIZON}": (HORIZON, Mode.CHUNKS),
        f"chunks of {HORIZON}, prefetch": (HORIZON, Mode.PREFETCH),
    }

    def remote(horizon: int, mode: Mode) -> Measured:
        return lambda: _served(
            horizon, 0.0, lambda server: _driver(plan, mode, address=server.address)
        )

    sides = {case: remote(*how) for case, how in cases.items()}
    alone = {SIMULATOR: lambda: measure([], [_driver(plan, Mode.SIMULATOR)])}
    return _compared(Row.CHUNKS, "steps/s", {**sides, **alone}, plan, note, _CHUNKS_GOAL)


def _batched(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Return how much of the policy clients get that ask again at once, one row each."""

    def remote(max_delay_s: float) -> Measured:
        return lambda: _served(1, max_delay_s, lambda server: _clients(plan, server))

    sides = {
        f"{_CLIENTS} clients": remote(0.0),
        f"{_CLIENTS} clients, max_delay_s={plan.max_delay_s:g}": remote(plan.max_delay_s),
    }
    alone = {POLICY: lambda: measure([], [_driver(plan, Mode.POLICY, rows=_CLIENTS)])}
    return _compared(Row.BATCHED, "actions/s", {**sides, **alone}, plan, note, _BATCHED_GOAL)


def _compared(
    row: Row, unit: str, sides: Mapping[str, Measured], plan: RobotsPlan, note: Note, goal: Goal
) -> Iterator[Finding]:
    """Compare each side with the last one; the goal is that of the last but one."""
    record = Record(row, note)
    for repetition in range(plan.repetitions):
        for side, measured in by_turns(list(sides.items()), repetition):
            reading = measured()
            record.add(row, side, repetition, reading.answers_per_s, unit, reading)
    found = record.sides(row)
    *cases, alone = sides
    for case in cases:
        both = {OURS: found[case], alone: found[alone]}
        shares = ratios(both)
        judged = shares[f"/ {alone}"] if case == cases[-1] else None
        yield Finding(row, case, unit, both, shares, goal if judged else None, judged)


def _served(horizon: int, max_delay_s: float, client: Callable[[Server], ClientJob]) -> Reading:
    """Measure a client of a fresh server."""
    command = [sys.executable, "-m", "benchmarks.robots.model_server"]
    with Server("the policy's server", [*command, str(horizon), str(max_delay_s)]) as server:
        return measure([server.pid], [client(server)])


def _driver(plan: RobotsPlan, mode: Mode, *, address: str = "", rows: int = 1) -> ClientJob:
    return DriverJob(mode, address, rows, plan.warm_up_s, plan.seconds).job()


def _clients(plan: RobotsPlan, server: Server) -> ClientJob:
    routes = tuple(f"route-{index}" for index in range(_CLIENTS))
    return Load(server.port, "ours", routes, 1, plan.warm_up_s, plan.seconds).job()
