"""Train two agents that differ, each with a policy of its own, on an environment behind endpoints.

    python examples/two_agents.py

A scout and a carrier on a line are to meet. RLlib's MultiAgentEnv can be hosted, as here, and
PettingZoo's ParallelEnv; the agents may have different spaces, and may come and go. Needs the
extra ``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
from typing import Any

import numpy as np
import ray
from gymnasium.spaces import Box, Discrete
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--lanes", type=int, default=8, help="environments that are stepped at once")
parser.add_argument("--iterations", type=int, default=8)
parser.add_argument("--batch", type=int, default=512, help="steps of an iteration")


class Meeting(MultiAgentEnv):
    """The scout, quick, sees the carrier's distance; the carrier sees only the direction."""

    def __init__(self) -> None:
        self.possible_agents = ["scout", "carrier"]
        self.observation_spaces = {"scout": Box(-20, 20, (1,)), "carrier": Box(-1, 1, (1,))}
        self.action_spaces: dict[str, Any] = {"scout": Discrete(5), "carrier": Discrete(3)}
        super().__init__()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Put them somewhere."""
        super().reset(seed=seed, options=options)
        self.steps, self.distance = 0, int(self.np_random.integers(-10, 11))
        return self._seen(), {}

    def step(self, action_dict: Any) -> Any:
        """Move both; each pays for being far from the other, and for each of its own steps."""
        self.steps += 1
        moves = {"scout": int(action_dict["scout"]) - 2, "carrier": int(action_dict["carrier"]) - 1}
        self.distance = max(-20, min(20, self.distance + moves["carrier"] - moves["scout"]))
        rewards = {agent: -abs(self.distance) / 10 - abs(moves[agent]) / 20 for agent in moves}
        return self._seen(), rewards, {"__all__": False}, {"__all__": self.steps == 16}, {}

    def _seen(self) -> dict[str, Any]:
        seen = {"scout": self.distance, "carrier": np.sign(self.distance)}
        return {agent: np.array([value], np.float32) for agent, value in seen.items()}


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns of both."""
    ray.init(log_to_driver=False)
    config = (
        PPOConfig()
        .training(
            lr=3e-3,
            gamma=0.9,
            train_batch_size_per_learner=arguments.batch,
            minibatch_size=min(128, arguments.batch),
            num_epochs=6,
        )
        .env_runners(num_env_runners=0)
        .multi_agent(
            policies={"scout", "carrier"},
            policy_mapping_fn=lambda agent_id, *_args, **_kwargs: agent_id,
        )
    )
    algorithm = configure(config, Meeting, num_envs=arguments.lanes).build_algo()
    for iteration in range(1, arguments.iterations + 1):
        returns = algorithm.train()["env_runners"]["agent_episode_returns_mean"]
        print(
            f"iteration {iteration}: mean return of the scout {returns['scout']:.1f}, "
            f"of the carrier {returns['carrier']:.1f}"
        )
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
