"""What the sampling loop of a runner shares with its path and with its recovery of sessions."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments
from rlmesh_ray.rllib.runner.slot import Slot

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.sampling_path import SamplingPath


@dataclass(slots=True)
class SampleCall:
    """A call of ``sample``: what was asked for, and the results so far.

    Timesteps are requested ahead: once those that have been requested are enough, no slot is
    stepped any more. So a call brings the number that was asked for and less than one slot's lanes
    beyond, all of it with the weights of this call, and no step is in flight at its end. Episodes
    are counted as they end: steps of other slots may be in flight then.
    """

    num_timesteps: int | None
    num_episodes: int | None
    """One of both is None."""
    explore: bool = True
    random_actions: bool = False
    weights_seq_no: int = 0
    """RLlib's version of the module's weights."""
    deadline_s: float | None = None
    """When to return although no endpoint has answered, by ``time.monotonic``; None: never."""
    timesteps: int = 0
    """Timesteps that have arrived: of environments, or of agents (``count_steps_by``)."""
    episodes: int = 0
    in_flight: int = 0
    """Timesteps that were requested and have not arrived."""
    env_steps: int = 0
    """Environment steps of lanes with several agents."""
    returned: list[Any] = field(default_factory=list)
    """Episodes that have ended, in RLlib's order."""
    interrupted: list[Any] = field(default_factory=list)
    """Episodes that a failure or a move of their session has truncated."""

    @property
    def is_open(self) -> bool:
        if self.num_timesteps is None:
            return not self.is_full
        return self.timesteps + self.in_flight < self.num_timesteps

    @property
    def is_full(self) -> bool:
        if self.num_timesteps is not None:
            return self.timesteps >= self.num_timesteps and not self.in_flight
        assert self.num_episodes is not None
        return self.episodes >= self.num_episodes


class SamplingState:
    """The sessions of a runner, the running episodes of its lanes, and the call in progress."""

    slots: Sequence[Slot] = ()
    assignments: SessionAssignments
    """Where the sessions are opened."""
    path: "SamplingPath"
    """Chooses actions and builds episodes."""
    episodes: list[Any]
    """RLlib's list of the running episodes, one for each lane."""
    call: SampleCall
    """The call of ``sample`` in progress, or the last one."""
