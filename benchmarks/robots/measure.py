"""What a policy of 20 ms does to the pace of a simulator, what eight clients get, and images.

Every measurement has fresh processes; the sides of a row take turns in going first.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.findings import Finding, Goal
from benchmarks.load import ClientJob, Load
from benchmarks.processes import Reading, Server, measure
from benchmarks.record import Note, Record, by_turns, ratios
from benchmarks.robots.driver import DriverJob, Mode
from benchmarks.robots.plan import RobotsPlan, Row
from benchmarks.robots.policy import HORIZON
from benchmarks.robots.thin_link import RATE, ThinLink

OURS = "rlmesh-ray"
SIMULATOR, POLICY, ONE_AT_A_TIME = "simulator alone", "policy alone", "one at a time"
RAW = "raw images"

_CHUNKS_GOAL = Goal(f"/ {SIMULATOR} >= 0.95", 0.95)
_BATCHED_GOAL = Goal(f"/ {POLICY} >= 0.9", 0.9)
_CAMERAS_GOAL = Goal(f"/ {RAW} >= 10", 10.0)
_OPENPI_GOAL = Goal(f"/ {ONE_AT_A_TIME} >= 3", 3.0)
_CLIENTS = 8

Measured = Callable[[], Reading]


def measure_robots(plan: RobotsPlan, note: Note) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.

    Raises:
        ConfigurationError: The thin link of cameras cannot be made here.
        EndpointError: A process failed; there is no number.
    """
    rows = {
        Row.CHUNKS: _chunks,
        Row.BATCHED: _batched,
        Row.OPENPI: _openpi,
        Row.CAMERAS: _cameras,
    }
    for row, measured in rows.items():
        if row in plan.rows:
            yield list(measured(plan, note))


def _chunks(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Return how much of its own rate a simulator keeps."""
    prefetch = f"chunks of {HORIZON}, prefetch"
    cases = {
        "one action a request": (1, Mode.ONE_ACTION),
        f"chunks of {HORIZON}": (HORIZON, Mode.CHUNKS),
        prefetch: (HORIZON, Mode.PREFETCH),
    }

    def remote(horizon: int, mode: Mode) -> Measured:
        return lambda: _served(
            _model_server(horizon), lambda server: _driver(plan, mode, address=server.address)
        )

    sides = {case: remote(*how) for case, how in cases.items()}
    alone = {SIMULATOR: lambda: measure([], [_driver(plan, Mode.SIMULATOR)])}
    goals = {prefetch: _CHUNKS_GOAL}
    return _compared(Row.CHUNKS, "steps/s", {**sides, **alone}, plan, note, goals)


def _batched(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Return how much of the policy clients get that ask again at once, one row each."""

    def remote(max_delay_s: float) -> Measured:
        return lambda: _served(_model_server(1, max_delay_s), lambda server: _clients(plan, server))

    without, delayed = _delays(plan)
    sides = {without: remote(0.0), delayed: remote(plan.max_delay_s)}
    alone = {POLICY: lambda: measure([], [_driver(plan, Mode.POLICY, rows=_CLIENTS)])}
    goals = {delayed: _BATCHED_GOAL}
    return _compared(Row.BATCHED, "actions/s", {**sides, **alone}, plan, note, goals)


def _openpi(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Compare openpi clients of a ModelServer with those of a server without batches."""

    def asked(server: Sequence[str]) -> Measured:
        return lambda: _served(
            server,
            lambda server: _driver(plan, Mode.OPENPI, address=server.address, rows=_CLIENTS),
        )

    without, delayed = _delays(plan)
    sides = {
        without: asked(_model_server(1, 0.0, "openpi")),
        delayed: asked(_model_server(1, plan.max_delay_s, "openpi")),
        ONE_AT_A_TIME: asked([sys.executable, "-m", "benchmarks.robots.openpi_server"]),
    }
    return _compared(Row.OPENPI, "actions/s", sides, plan, note, {without: _OPENPI_GOAL})


def _cameras(plan: RobotsPlan, note: Note) -> Iterator[Finding]:
    """Compare how the images of two cameras pass a thin link."""
    with ThinLink() as link:
        command = [*link.prefix, sys.executable, "-m", "benchmarks.robots.cameras", link.host]

        def asked(mode: Mode) -> Measured:
            return lambda: _served(
                command, lambda server: _driver(plan, mode, address=server.address)
            )

        small = f"jpeg:95 of 224x224, {RATE}"
        sides = {small: asked(Mode.SMALL_IMAGES), RAW: asked(Mode.RAW_IMAGES)}
        goals = {small: _CAMERAS_GOAL}
        yield from _compared(Row.CAMERAS, "requests/s", sides, plan, note, goals)


def _compared(
    row: Row,
    unit: str,
    sides: Mapping[str, Measured],
    plan: RobotsPlan,
    note: Note,
    goals: Mapping[str, Goal],
) -> Iterator[Finding]:
    """Compare each side with the last one; ``goals`` are of these shares, by side."""
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
        judged = shares[f"/ {alone}"] if case in goals else None
        yield Finding(row, case, unit, both, shares, goals.get(case), judged)


def _delays(plan: RobotsPlan) -> tuple[str, str]:
    """Return the names of the clients of a server without, and with a delay."""
    return f"{_CLIENTS} clients", f"{_CLIENTS} clients, max_delay_s={plan.max_delay_s:g}"


def _model_server(horizon: int, max_delay_s: float = 0.0, *more: str) -> Sequence[str]:
    command = (sys.executable, "-m", "benchmarks.robots.model_server")
    return (*command, str(horizon), str(max_delay_s), *more)


def _served(command: Sequence[str], client: Callable[[Server], ClientJob]) -> Reading:
    """Measure a client of a fresh server."""
    with Server("the policy's server", command) as server:
        return measure([server.pid], [client(server)])


def _driver(plan: RobotsPlan, mode: Mode, *, address: str = "", rows: int = 1) -> ClientJob:
    return DriverJob(mode, address, rows, plan.warm_up_s, plan.seconds).job()


def _clients(plan: RobotsPlan, server: Server) -> ClientJob:
    routes = tuple(f"route-{index}" for index in range(_CLIENTS))
    return Load(server.port, "ours", routes, 1, plan.warm_up_s, plan.seconds).job()
