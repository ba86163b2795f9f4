"""What can be traced; standard library only, as for the help of a command."""

from dataclasses import dataclass
from enum import StrEnum


class Subject(StrEnum):
    """What is traced."""

    STEP = "step"
    PREDICTION = "prediction"
    RUNNER = "runner"


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls of a step of all lanes, or of a prediction of all rows."""

    case: str
    client: int
    """In all threads of the client."""
    client_files: int
    """How many files these functions belong to."""
    endpoint: int | None = None
    """None, here and below, with a runner, whose client alone is counted."""
    worker: int | None = None
    """None with a policy, too."""
    files: int | None = None
    """How many files the functions of all belong to."""
