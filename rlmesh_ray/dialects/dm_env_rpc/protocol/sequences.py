"""The words of a dm_env_rpc world: what happens to sequences, and what is done to lanes.

Every change of a sequence is in SEQUENCES.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import ErrorResponse, SequenceState
from rlmesh_ray.protocol.messages import message


class SequencePhase(enum.Enum):
    """Where the sequence of a seat stands."""

    BETWEEN = enum.auto()
    """The next Step begins a sequence."""
    RUNNING = enum.auto()
    CUT = enum.auto()
    """It has ended already; the next Step tells."""


class SequenceEvent(enum.Enum):
    """What happens to a sequence."""

    BEGIN = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()
    """The environment has ended it."""
    TELL = enum.auto()
    """The agent hears that it was cut."""
    RESET = enum.auto()
    """The agent itself ends it, and knows."""
    CUT = enum.auto()
    """Somebody else has reset the world, or its lanes are lost."""


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
    """What a lane of the environment holds."""

    NEW = enum.auto()
    """Nothing: it was never reset, is to start over, or is lost."""
    FRESH = enum.auto()
    """The first observation of an episode, which nobody has seen."""
    LIVE = enum.auto()
    ENDED = enum.auto()


@message
class ResetLanes:
    """Work: begin episodes."""

    lanes: tuple[int, ...]
    """Empty: all, with the order of the world."""
    reset_options: object
    """What was asked for with a reset; None: nothing."""


@message
class StepLanes:
    """Work: step all lanes."""

    actions: Mapping[int, object]
    """By seat; the others have none."""


Work = ResetLanes | StepLanes


@message
class LanesReset:
    """Outcome of ResetLanes."""

    frame: object
    """What all lanes show."""


@message
class LanesStepped:
    """Outcome of StepLanes."""

    frame: object
    states: Mapping[int, SequenceState]
    """By seat that acted: whether the environment goes on for it."""
    has_ended: Sequence[bool]
    """By lane."""


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """Outcome of any work."""

    refusal: ErrorResponse
    is_lost: bool
    """Whether the lanes are gone; else nothing has happened."""


Outcome = LanesReset | LanesStepped | WorkFailed


@message
class AgentStepReply:
    """Answers a Step."""

    state: SequenceState
    frame: object
    """What the lanes show, or showed last."""
    is_acted: bool
    """Whether the frame is the consequence of an action, so that its rewards count."""


Reply = AgentStepReply | ErrorResponse
