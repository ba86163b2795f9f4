"""A look at everything that a runner samples from stairs, while an algorithm trains on it."""

from typing import Any

import numpy as np
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

NUM_VERIFIED = "num_verified"
NUM_BROKEN = "num_broken"


class Verifier(RLlibCallback):
    """Counts, as metrics of the runner, transitions that are as they must be, and other chunks.

    Stairs count their steps in what is observed and in the rewards. So it shows if a transition is
    missing, is there twice, or is of another episode.
    """

    def __init__(self) -> None:
        super().__init__()
        self._steps: dict[str, int] = {}
        """Of each episode so far; -1: it is over."""

    def on_sample_end(
        self, *, samples: list[SingleAgentEpisode], metrics_logger: Any, **_kwargs: Any
    ) -> None:
        verified = broken = 0
        for chunk in samples:
            before = self._steps.get(chunk.id_, 0)
            steps = before + np.arange(len(chunk) + 1)
            is_right = (
                chunk.t_started == before
                and np.array_equal(chunk.get_observations()[:, 0], steps)
                and np.array_equal(chunk.get_rewards(), steps[1:])
            )
            verified += len(chunk) if is_right else 0
            broken += not is_right
            self._steps[chunk.id_] = -1 if chunk.is_done else int(steps[-1])
        metrics_logger.log_value(NUM_VERIFIED, verified, reduce="lifetime_sum")
        metrics_logger.log_value(NUM_BROKEN, broken, reduce="lifetime_sum")
