"""How much a call of ``sample`` collects, and what it has collected so far."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SampleBudget:
    """Counts timesteps or episodes against the number that was asked for.

    Timesteps are requested ahead: once those that have been requested are enough, no slot is
    stepped any more. So a call brings the number that was asked for and less than one slot's lanes
    beyond, all of it with the weights of this call, and no step is in flight at its end. Episodes
    are counted as they end: steps of other slots may be in flight then.
    """

    num_timesteps: int | None
    num_episodes: int | None
    """One of both is None."""
    timesteps: int = 0
    episodes: int = 0
    in_flight: int = 0
    """Timesteps that were requested and have not arrived."""

    @property
    def is_open(self) -> bool:
        """Whether to request more steps."""
        if self.num_timesteps is None:
            return not self.is_full
        return self.timesteps + self.in_flight < self.num_timesteps

    @property
    def is_full(self) -> bool:
        """Whether as much has arrived as was asked for."""
        if self.num_timesteps is not None:
            return self.timesteps >= self.num_timesteps and not self.in_flight
        assert self.num_episodes is not None
        return self.episodes >= self.num_episodes


@dataclass(slots=True)
class SampleCall:
    """The arguments of a call of ``sample``, and its results so far."""

    budget: SampleBudget
    explore: bool = True
    random_actions: bool = False
    deadline_s: float | None = None
    """When to return although no endpoint has answered, by ``time.monotonic``; None: never."""
    env_steps: int = 0
    """Environment steps so far; ``budget`` may count the steps of agents instead."""
    returned: list[Any] = field(default_factory=list)
    """Episodes that have ended, in RLlib's order."""
    interrupted: list[Any] = field(default_factory=list)
    """Episodes that a failure or a move of their session has truncated."""
