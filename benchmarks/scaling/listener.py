"""Callbacks of a scaling measurement, and what they get."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.record import Note

OURS = "rlmesh-ray"
"""The side that is measured."""
SIMULATOR = "benchmarks.scaling.sleeping_env:Simulator"
START_S = 600.0
"""How long nodes, endpoints and runners may take, on a machine with much else to do."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement that a measurement found."""

    case: str
    repetition: int
    load_average: float
    """Of the last minute, before anything was started for it."""
    num_nodes: int
    """That Ray counts."""
    endpoints_by_node: tuple[int, ...]
    """Of the nodes that have any."""
    endpoints_s: float
    """How long it took to start the endpoints, once Ray was there."""
    runners_s: float
    """How long it took to start the runners, until each had sampled its first steps."""
    one_by_one: str | None
    """Why runners do not take the fast path; None: they do."""


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks of a benchmark."""

    note: Note
    """Gets every rate when it is measured."""
    placed: Callable[[Placed], None]
    """Gets the placement that was found, before it is measured."""
    doubt: Callable[[str], None]
    """Gets each caveat about the figures, as a sentence."""
