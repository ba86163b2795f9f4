"""What the host of an environment or policy reports back to its session.

The host does the work and knows nothing of request ids, episodes or error codes; the
session turns an outcome into the one response that the request gets.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmesh_ray.protocol.messages import Infos

NOT_STARTED = "the environment has not started within"
"""How the message of a TIMEOUT begins when the environment is still starting: the request was not
executed, the start goes on, and a client may send the request again."""


class FailureKind(enum.Enum):
    """Why a host could not do what a legal request asked."""

    TIMEOUT = enum.auto()
    """The deadline passed; the worker may still be busy, its result reaches nobody."""
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
    """The request's number is none that can come now; its client has lost count."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The host could not do it."""

    kind: FailureKind
    message: str
    """One line, for the peer."""
    debug_info: str = ""
    """The remote traceback, as text."""


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """The lanes were reset."""

    observation: bytes
    """A batch over all lanes, encoded by the dialect; over those that were reset where the rules
    narrow replies."""
    infos: Infos


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The lanes were stepped; every sequence has one entry for each lane that was."""

    observation: bytes
    rewards: Sequence[float]
    terminated: bytes
    """One byte each, nonzero means set."""
    truncated: bytes
    infos: Infos
    final_infos: Mapping[int, Infos] = field(default_factory=dict)
    """By lane: the last infos of each episode that ended on this step."""


@dataclass(frozen=True, slots=True)
class RenderOutcome:
    """A picture was asked for."""

    png: bytes | None
    """None: the environment gives no frame."""
    took_s: float = 0.0
    """How long it took."""


EnvOutcome = ResetOutcome | StepOutcome | RenderOutcome | Failure
