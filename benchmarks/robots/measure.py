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

Client = Callable[[str], ClientJob]
"""Returns the client of a server at an address; of none, where it is empty."""
Read = Callable[[Client, Sequence[str]], Reading]
"""Measures a client of a fresh server with that command; without one where it is empty."""
Side = tuple[Client, Sequence[str]]


def read(client: Client, command: Sequence[str]) -> Reading:
    """See ``Read``."""
    if not command:
        return measure([], [client("")])
    with Server("the policy's server", command) as server:
        return measure([server.pid], [client(server.address)])


def measure_robots(plan: RobotsPlan, note: Note, read: Read = read) -> Iterator[list[Finding]]:
    """Measure all of ``plan``; yield what was found, one row after the other.

    Args:
        plan: What to measure.
        note: Gets every single measurement when it is made.
        read: Makes each of them.

    Raises:
        ConfigurationError: The thin link of cameras cannot be made here.
        EndpointError: A process failed; there is no number.
    """
    bench = _Bench(plan, note, read)
    rows = {
        Row.CHUNKS: bench.chunks,
        Row.BATCHED: bench.batched,
        Row.OPENPI: bench.openpi,
        Row.CAMERAS: bench.cameras,
    }
    for row, measured in rows.items():
        if row in plan.rows:
            yield list(measured())


class _Bench:
    """A method a row."""

    def __init__(self, plan: RobotsPlan, note: Note, read: Read) -> None:
        self._plan = plan
        self._note = note
        self._read = read
        self._without = f"{_CLIENTS} clients"
        self._delayed = f"{_CLIENTS} clients, max_delay_s={plan.max_delay_s:g}"

    def chunks(self) -> Iterator[Finding]:
        """Return how much of its own rate a simulator keeps."""
        prefetch = f"chunks of {HORIZON}, prefetch"
        sides = {
            "one action a request": (self._driver(Mode.ONE_ACTION), _model_server(1)),
            f"chunks of {HORIZON}": (self._driver(Mode.CHUNKS), _model_server(HORIZON)),
            prefetch: (self._driver(Mode.PREFETCH), _model_server(HORIZON)),
            SIMULATOR: (self._driver(Mode.SIMULATOR), ()),
        }
        return self._compared(Row.CHUNKS, "steps/s", sides, {prefetch: _CHUNKS_GOAL})

    def batched(self) -> Iterator[Finding]:
        """Return how much of the policy clients get that ask again at once, one row each."""
        sides = {
            self._without: (self._clients, _model_server(1)),
            self._delayed: (self._clients, _model_server(1, self._plan.max_delay_s)),
            POLICY: (self._driver(Mode.POLICY, _CLIENTS), ()),
        }
        return self._compared(Row.BATCHED, "actions/s", sides, {self._delayed: _BATCHED_GOAL})

    def openpi(self) -> Iterator[Finding]:
        """Compare openpi clients of a ModelServer with those of a server without batches."""
        client = self._driver(Mode.OPENPI, _CLIENTS)
        sides = {
            self._without: (client, _model_server(1, 0.0, "openpi")),
            self._delayed: (client, _model_server(1, self._plan.max_delay_s, "openpi")),
            ONE_AT_A_TIME: (client, [sys.executable, "-m", "benchmarks.robots.openpi_server"]),
        }
        return self._compared(Row.OPENPI, "actions/s", sides, {self._without: _OPENPI_GOAL})

    def cameras(self) -> Iterator[Finding]:
        """Compare how the images of two cameras pass a thin link."""
        with ThinLink() as link:
            command = [*link.prefix, sys.executable, "-m", "benchmarks.robots.cameras", link.host]
            small = f"jpeg:95 of 224x224, {RATE}"
            sides = {
                small: (self._driver(Mode.SMALL_IMAGES), command),
                RAW: (self._driver(Mode.RAW_IMAGES), command),
            }
            yield from self._compared(Row.CAMERAS, "requests/s", sides, {small: _CAMERAS_GOAL})

    def _driver(self, mode: Mode, rows: int = 1) -> Client:
        times = self._plan.warm_up_s, self._plan.seconds
        return lambda address: DriverJob(mode, address, rows, *times).job()

    def _clients(self, address: str) -> ClientJob:
        routes = tuple(f"route-{index}" for index in range(_CLIENTS))
        port = int(address.rpartition(":")[2])
        return Load(port, "ours", routes, 1, self._plan.warm_up_s, self._plan.seconds).job()

    def _compared(
        self, row: Row, unit: str, sides: Mapping[str, Side], goals: Mapping[str, Goal]
    ) -> Iterator[Finding]:
        """Compare each side with the last one; ``goals`` are of these shares, by side."""
        record = Record(row, self._note)
        for repetition in range(self._plan.repetitions):
            for side, (client, command) in by_turns(list(sides.items()), repetition):
                reading = self._read(client, command)
                record.add(row, side, repetition, reading.answers_per_s, unit, reading)
        found = record.sides(row)
        *cases, alone = sides
        for case in cases:
            both = {OURS: found[case], alone: found[alone]}
            shares = ratios(both)
            judged = shares[f"/ {alone}"] if case in goals else None
            yield Finding(row, case, unit, both, shares, goals.get(case), judged)


def _model_server(horizon: int, max_delay_s: float = 0.0, *more: str) -> Sequence[str]:
    command = (sys.executable, "-m", "benchmarks.robots.model_server")
    return (*command, str(horizon), str(max_delay_s), *more)
