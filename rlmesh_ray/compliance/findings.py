"""Results of checks: a check returns if its clause holds, and raises one of two exceptions else."""

import enum
from dataclasses import dataclass


class ClauseBroken(Exception):  # a verdict rather than an error
    """The server violates the clause; the message says how."""


class ClauseNotObservable(Exception):
    """The clause cannot be checked with this endpoint; the message says what is missing."""


class Verdict(enum.Enum):
    """Verdict of one check."""

    HOLDS = "holds"
    BROKEN = "broken"
    NOT_OBSERVABLE = "not observable"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    clause: str
    """Key of the clause."""
    service: str
    """``"env"`` or ``"model"``."""
    verdict: Verdict
    message: str = ""
    """The violation, or what is missing; empty where the clause holds."""


def require(condition: bool, message: str) -> None:
    """Raise ClauseBroken with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ClauseBroken(message)
