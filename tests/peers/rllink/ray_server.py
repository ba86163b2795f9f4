"""Ray's own EnvRunner that listens: gives one client weights, after each sample others.

Prints what each sample holds, and the weights' sum, one line of JSON each. Takes the port and the
number of samples.
"""

import json
import sys
from typing import Any

import gymnasium
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.external.env_runner_server_for_external_inference import (
    EnvRunnerServerForExternalInference,
)


def main() -> None:
    """Serve."""
    port, num_samples = int(sys.argv[1]), int(sys.argv[2])
    env = gymnasium.make("CartPole-v1")
    config = PPOConfig().environment(
        observation_space=env.observation_space,
        action_space=env.action_space,
        env_config={"port": port},
    )
    runner = EnvRunnerServerForExternalInference(config=config, worker_index=0)
    for number in range(1, num_samples + 1):
        episodes = runner.sample()
        reported = [
            {
                "id": episode.id_,
                "length": len(episode),
                "return": episode.get_return(),
                "is_done": episode.is_done,
                "last_obs": episode.get_observations(-1).tolist(),
                "logp": episode.get_extra_model_outputs("action_logp").tolist(),
            }
            for episode in episodes
        ]
        print(json.dumps(reported), flush=True)  # noqa: T201  # read by the test
        state: dict[str, Any] = runner.module.get_state()
        state = {name: values + 1 for name, values in state.items()}
        runner.set_state({"rl_module": state, "weights_seq_no": number})


main()
