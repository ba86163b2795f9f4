"""How much one call of ``sample`` is to bring, and how much of that is on its way."""

from dataclasses import dataclass


@dataclass(slots=True)
class SampleBudget:
    """Counts timesteps or episodes.

    Timesteps are asked for ahead: as soon as those that have been asked for are enough, no slot is
    asked any more. So a call brings what it should and less than one slot's lanes beyond, all of
    it with the weights of this call, and nothing is on its way when it ends.
    """

    num_timesteps: int | None
    num_episodes: int | None
    """One of both is None."""
    timesteps: int = 0
    episodes: int = 0
    in_flight: int = 0
    """Timesteps that are on their way."""

    @property
    def is_open(self) -> bool:
        """Whether to ask for more."""
        if self.num_timesteps is None:
            return not self.is_full
        return self.timesteps + self.in_flight < self.num_timesteps

    @property
    def is_full(self) -> bool:
        """Whether all that was wanted is there."""
        if self.num_timesteps is not None:
            return self.timesteps >= self.num_timesteps and not self.in_flight
        assert self.num_episodes is not None
        return self.episodes >= self.num_episodes
