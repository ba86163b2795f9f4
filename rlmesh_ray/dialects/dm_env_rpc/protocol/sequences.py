"""States, events and work of a dm_env_rpc world.

SEQUENCES has every transition of a sequence.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import ErrorResponse, SequenceState
from rlmesh_ray.protocol.messages import message


class SequencePhase(enum.Enum):
    """State of the sequence of a slot."""

    BETWEEN = enum.auto()
    """The next Step begins a sequence."""
    RUNNING = enum.auto()
    CUT = enum.auto()
    """It has ended, and the answer to the next Step reports that."""


class SequenceEvent(enum.Enum):
    """Event in a sequence."""

    BEGIN = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()
    """The environment has ended it."""
    TELL = enum.auto()
    """An answer reports to the agent that its sequence was cut."""
    RESET = enum.auto()
    """The agent itself ends it."""
    CUT = enum.auto()
    """Another stream has reset the world, or its lanes are lost."""


SEQUENCES: Mapping[SequencePhase, Mapping[SequenceEvent, SequencePhase]] = {
    SequencePhase.BETWEEN: {
        SequenceEvent.BEGIN: SequencePhase.RUNNING,
        SequenceEvent.RESET: SequencePhase.BETWEEN,
        SequenceEvent.CUT: SequencePhase.BETWEEN,
    },
    SequencePhase.RUNNING: {
        SequenceEvent.GO_ON: SequencePhase.RUNNING,
        SequenceEvent.END: SequencePhase.BETWEEN,
        SequenceEvent.RESET: SequencePhase.BETWEEN,
        SequenceEvent.CUT: SequencePhase.CUT,
    },
    SequencePhase.CUT: {
        SequenceEvent.TELL: SequencePhase.BETWEEN,
        SequenceEvent.END: SequencePhase.BETWEEN,
        SequenceEvent.RESET: SequencePhase.BETWEEN,
        SequenceEvent.CUT: SequencePhase.CUT,
    },
}


class LaneState(enum.Enum):
    """State of a lane of the environment."""

    NEW = enum.auto()
    """It was never reset, must start over, or is lost."""
    FRESH = enum.auto()
    """It has begun an episode, whose first observation no agent has received."""
    LIVE = enum.auto()
    ENDED = enum.auto()


@message
class ResetLanes:
    """Work: begin episodes."""

    lanes: tuple[int, ...]
    """Empty: all, with the world's reset options."""
    reset_options: object
    """Options of the request; None: it has none."""


@message
class StepLanes:
    """Work: step all lanes."""

    actions: Mapping[int, object]
    """By slot, for those that act."""


Work = ResetLanes | StepLanes


@message
class LanesReset:
    """Outcome of ResetLanes."""

    frame: object
    """Observations of all lanes."""


@message
class LanesStepped:
    """Outcome of StepLanes."""

    frame: object
    states: Mapping[int, SequenceState]
    """Of the sequence, by slot that has acted."""
    has_ended: Sequence[bool]
    """By lane."""


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Outcome of any work."""

    refusal: ErrorResponse
    is_lost: bool
    """Whether the lanes are lost; if not, they are as before."""


Outcome = LanesReset | LanesStepped | WorkFailed


@message
class AgentStepReply:
    """Answers a Step."""

    state: SequenceState
    frame: object
    """Latest observations of all lanes."""
    is_acted: bool
    """Whether an action has led to the frame, so that its rewards count."""


Reply = AgentStepReply | ErrorResponse
