"""The checks by clause, and their results.

A check returns if its clause holds, and raises one of two exceptions else.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from rlmesh_ray.compliance.clauses import CLAUSES

SubjectT = TypeVar("SubjectT")
Check = Callable[[SubjectT], None]


def holds(
    checks: dict[str, Check[SubjectT]], clause: str
) -> Callable[[Check[SubjectT]], Check[SubjectT]]:
    """Add the decorated function to the checks of a service, by its clause."""
    assert clause in CLAUSES, clause

    def keep(check: Check[SubjectT]) -> Check[SubjectT]:
        assert clause not in checks, clause
        checks[clause] = check
        return check

    return keep


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
    if not condition:
        raise ClauseBroken(message)
