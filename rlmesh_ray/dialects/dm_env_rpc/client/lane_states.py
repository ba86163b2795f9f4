"""What the states of dm_env_rpc's sequences mean for lanes: terminated, truncated, begun anew.

Rule 1: A step from a state that is not RUNNING begins the next sequence and ignores the action.
That is the autoreset mode NEXT_STEP: such a step has no reward and ends nothing.
Rule 2: Such a step must answer RUNNING: a sequence of no steps is none.
Rule 3: A step from RUNNING that answers TERMINATED has ended the episode, one that answers
INTERRUPTED has cut it off.
Rule 4: TERMINATED with a discount above 0 is a cut as well, as dm_env has it. Servers that know no
cuts send TERMINATED at time limits, and nothing in the message tells: ``TerminationRules`` does.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import SequenceState
from rlmesh_ray.errors import ConfigurationError, RemoteProtocolError


class Transition(enum.Enum):
    """What a step has done to a lane."""

    BEGIN = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()
    CUT = enum.auto()


# Whether it was running, and what the step has answered. What is missing breaks rule 2.
_MOVES: Mapping[tuple[bool, SequenceState], Transition] = {
    (False, SequenceState.RUNNING): Transition.BEGIN,
    (True, SequenceState.RUNNING): Transition.GO_ON,
    (True, SequenceState.TERMINATED): Transition.END,
    (True, SequenceState.INTERRUPTED): Transition.CUT,
}


@dataclass(frozen=True, slots=True)
class TerminationRules:
    """What TERMINATED means where the server does not tell ends from cuts.

    Raises:
        ConfigurationError: The time limit is below 1.
    """

    truncate_on_terminated: bool = False
    """It is always a cut."""
    time_limit_steps: int | None = None
    """It is a cut in an episode that has had that many steps."""

    def __post_init__(self) -> None:
        if self.time_limit_steps is not None and self.time_limit_steps < 1:
            raise ConfigurationError(
                f"time_limit_steps={self.time_limit_steps} must be 1 or more, or None"
            )

    def is_truncation(self, num_steps: int, discount: float | None) -> bool:
        """Tell whether TERMINATED cuts an episode off, rather than ending it.

        Args:
            num_steps: Of the episode, this one included.
            discount: What the server says, if it does.
        """
        if self.truncate_on_terminated or (discount is not None and discount > 0.0):
            return True
        return self.time_limit_steps is not None and num_steps >= self.time_limit_steps


@dataclass(frozen=True, slots=True)
class LaneStep:
    """What a step has come to in one lane."""

    reward: float
    terminated: bool
    truncated: bool


class LaneStates:
    """The states of a session's lanes.

    Args:
        num_lanes: How many; none of them is running.
        rules: What TERMINATED means.
    """

    def __init__(self, num_lanes: int, rules: TerminationRules) -> None:
        self._states = [SequenceState.TERMINATED] * num_lanes
        self._num_steps = [0] * num_lanes
        self._rules = rules

    def is_running(self, lane: int) -> bool:
        """Tell whether the next step takes the lane's action."""
        return self._states[lane] is SequenceState.RUNNING

    def reset(self, lane: int) -> None:
        """Note that the server has reset a lane: its next step begins a sequence."""
        if self.is_running(lane):
            self._states[lane] = SequenceState.INTERRUPTED

    def step(self, lane: int, state: int, reward: float, discount: float | None) -> LaneStep:
        """Note what a step has answered.

        Args:
            lane: Index.
            state: As it came over the wire.
            reward: Of this step; nothing is earned by beginning.
            discount: None: the server sends none.

        Raises:
            RemoteProtocolError: There is no such state, or not after the last one.
        """
        before = self._states[lane]
        move = _MOVES.get((before is SequenceState.RUNNING, _state(lane, state)))
        if move is None:
            raise RemoteProtocolError(
                f"lane {lane} went from {before.name} to {SequenceState(state).name}: a sequence "
                "must begin with RUNNING, and have a step at least"
            )
        self._states[lane] = SequenceState(state)
        if move is Transition.BEGIN:
            self._num_steps[lane] = 0
            return LaneStep(0.0, False, False)
        self._num_steps[lane] += 1
        if move is Transition.END and self._rules.is_truncation(self._num_steps[lane], discount):
            move = Transition.CUT
        return LaneStep(reward, move is Transition.END, move is Transition.CUT)


def _state(lane: int, state: int) -> SequenceState:
    try:
        return SequenceState(state)
    except ValueError:
        raise RemoteProtocolError(
            f"lane {lane} answered a step with the state {state}, which dm_env_rpc does not have"
        ) from None
