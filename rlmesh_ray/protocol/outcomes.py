"""Outcomes: the results of executed requests, from which an EnvSession makes the responses.

The executor knows no request ids, episodes or error codes; the session turns each outcome into the
one response to its request.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmesh_ray.protocol.messages import Infos

NOT_STARTED = "the environment has not started within"
"""Prefix of the message of a TIMEOUT while the environment is starting: the request was not
executed, the start goes on, and the client may send the request again."""


class FailureKind(enum.Enum):
    """Why a legal request failed."""

    TIMEOUT = enum.auto()
    """The deadline passed; the worker may still be busy, and its result is dropped."""
    RAISED = enum.auto()
    """The environment raised; its worker lives."""
    CRASHED = enum.auto()
    """The worker died or was killed."""
    BAD_ACTION = enum.auto()
    """The action does not conform to its space; the environment never saw it."""
    BAD_OBSERVATION = enum.auto()
    """The environment's observation does not conform to its space."""
    BAD_REQUEST = enum.auto()
    """The request's own arguments are wrong; nothing has changed."""
    OUT_OF_ORDER = enum.auto()
    """The request's number is neither the last one nor the next (``transport.exactly_once``)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed."""

    kind: FailureKind
    message: str
    """Error message for the client, in one line."""
    debug_info: str = ""
    """Traceback of the worker, as text."""


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """The lanes were reset."""

    observation: bytes
    """A batch over all lanes, encoded by the dialect; with ``EnvRules.narrows_replies`` over those
    that were reset."""
    infos: Infos


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The lanes were stepped; every sequence has one entry for each stepped lane."""

    observation: bytes
    rewards: Sequence[float]
    terminated: bytes
    """One byte for each lane, nonzero means set."""
    truncated: bytes
    """One byte for each lane, nonzero means set."""
    infos: Infos
    final_infos: Mapping[int, Infos] = field(default_factory=dict)
    """By lane: the last infos of each episode that ended on this step."""


@dataclass(frozen=True, slots=True)
class RenderOutcome:
    """The lanes were rendered."""

    png: bytes | None
    """None: the environment has no frame."""
    took_s: float = 0.0
    """Duration of the call."""


EnvOutcome = ResetOutcome | StepOutcome | RenderOutcome | Failure
