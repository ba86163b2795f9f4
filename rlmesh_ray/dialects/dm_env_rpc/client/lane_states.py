"""Sequence states of dm_env_rpc as gymnasium's flags: terminated, truncated, reset.

Rule 1: A step from a state that is not RUNNING begins the next sequence and ignores the action.
That is the autoreset mode NEXT_STEP: such a step has no reward and ends nothing.
Rule 2: The answer to such a step must be RUNNING, since a sequence has at least one step.
Rule 3: A step from RUNNING to TERMINATED terminates the episode, one to INTERRUPTED truncates it.
Rule 4: TERMINATED with a discount above 0 is a truncation, too, as in dm_env. Servers that have no
truncations send TERMINATED at time limits, which ``TerminationRules`` identify.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import SequenceState
from rlmesh_ray.errors import ConfigurationError, RemoteProtocolError


class Transition(enum.Enum):
    """Effect of a step on a lane."""

    BEGIN = enum.auto()
    GO_ON = enum.auto()
    END = enum.auto()
    CUT = enum.auto()


# By whether the lane was running, and the state in the answer. A missing pair breaks rule 2.
_MOVES: Mapping[tuple[bool, SequenceState], Transition] = {
    (False, SequenceState.RUNNING): Transition.BEGIN,
    (True, SequenceState.RUNNING): Transition.GO_ON,
    (True, SequenceState.TERMINATED): Transition.END,
    (True, SequenceState.INTERRUPTED): Transition.CUT,
}


@dataclass(frozen=True, slots=True)
class TerminationRules:
    """When TERMINATED is a truncation, for servers that do not distinguish the two.

    Raises:
        ConfigurationError: The time limit is below 1.
    """

    truncate_on_terminated: bool = False
    """It always is."""
    time_limit_steps: int | None = None
    """It is in an episode with so many steps."""

    def __post_init__(self) -> None:
        if self.time_limit_steps is not None and self.time_limit_steps < 1:
            raise ConfigurationError(
                f"time_limit_steps={self.time_limit_steps} must be 1 or more, or None"
            )

    def is_truncation(self, num_steps: int, discount: float | None) -> bool:
        """Return whether TERMINATED truncates the episode.

        Args:
            num_steps: Steps of the episode, this one included.
            discount: The server's; None: it sends none.
        """
        if self.truncate_on_terminated or (discount is not None and discount > 0.0):
            return True
        return self.time_limit_steps is not None and num_steps >= self.time_limit_steps


@dataclass(frozen=True, slots=True)
class LaneStep:
    """Result of a step in one lane."""

    reward: float
    terminated: bool
    truncated: bool


class LaneStates:
    """The states of a session's lanes.

    Args:
        num_lanes: How many; none of them is running.
        rules: When TERMINATED is a truncation.
    """

    def __init__(self, num_lanes: int, rules: TerminationRules) -> None:
        self._states = [SequenceState.TERMINATED] * num_lanes
        self._num_steps = [0] * num_lanes
        self._rules = rules

    def is_running(self, lane: int) -> bool:
        """Return whether the next step applies the lane's action."""
        return self._states[lane] is SequenceState.RUNNING

    def reset(self, lane: int) -> None:
        """Note that the server has reset a lane: its next step begins a sequence."""
        if self.is_running(lane):
            self._states[lane] = SequenceState.INTERRUPTED

    def step(self, lane: int, state: int, reward: float, discount: float | None) -> LaneStep:
        """Handle the answer to a step.

        Args:
            lane: Index.
            state: The state's number on the wire.
            reward: The step's; ignored if it begins a sequence.
            discount: None: the server sends none.

        Raises:
            RemoteProtocolError: There is no such state, or it must not follow the last one.
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
