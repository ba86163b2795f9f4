"""Plan of a measurement of recordings: its rows.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass


class RecordingRow(enum.StrEnum):
    """What can be measured."""

    STEPS = "steps"
    VIDEO = "video"
    INDEX = "index"
    RENDER = "render"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """The rows, the repetitions and the durations."""

    rows: Sequence[RecordingRow] = tuple(RecordingRow)
    repetitions: int = 3
    warm_up_s: float = 3.0
    """Before each measurement of steps; not counted: the writer starts meanwhile."""
    seconds: float = 5.0
    """Of each measurement of steps."""
