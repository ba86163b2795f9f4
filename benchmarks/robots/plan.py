"""Plan of a measurement of simulators and robots: its rows.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class Row(enum.StrEnum):
    """What can be measured."""

    CHUNKS = "chunks"
    BATCHED = "batched"
    OPENPI = "openpi"
    CAMERAS = "cameras"


@dataclass(frozen=True, slots=True)
class RobotsPlan:
    """The rows, the repetitions and the durations."""

    rows: Sequence[Row] = tuple(Row)
    repetitions: int = 3
    warm_up_s: float = 1.0
    """Before each measurement; not counted."""
    seconds: float = 5.0
    """Of each measurement."""
    max_delay_s: float = 0.005
    """Of the server with a delay."""
