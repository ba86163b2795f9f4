"""How a check speaks: silence when the clause holds, one of two exceptions when not."""

import enum
from dataclasses import dataclass


class ClauseBroken(Exception):  # a verdict rather than an error
    """The server breaks the clause; the message says what it did."""


class ClauseNotObservable(Exception):
    """This endpoint gives no occasion to see the clause; the message says what is missing."""


class Verdict(enum.Enum):
    """What became of one check."""

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
    """What the server did, or what is missing; empty when the clause holds."""


def require(condition: bool, message: str) -> None:
    """Raise Broken with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ClauseBroken(message)
