"""Train PPO on simulators that run their own loop and connect to it, over RLlink.

    python examples/rllink_training.py                         # here
    python examples/rllink_simulator.py 127.0.0.1:5555         # as many as you like, anywhere
    python examples/per_action_simulator.py 127.0.0.1:5555     # those that cannot run a model

All at once, if you like. A simulator cannot be asked for its spaces, so they stand here. A port
that other machines can reach needs a token; here it comes from the variable RLMESH_RAY_TOKEN.
Needs the extras ``rllib`` and ``onnx``: ``pip install ".[rllib,onnx]"``.
"""

import argparse
import os

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.rllib import configure_rllink

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--address", default="127.0.0.1:5555", help="where to listen, HOST:PORT")
parser.add_argument("--simulators", type=int, default=1, help="how many are expected")
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns."""
    ray.init(log_to_driver=False)
    config = PPOConfig().training(
        lr=1e-3,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=8,
    )
    config.env_runners(num_env_runners=0)
    configure_rllink(
        config,
        observation_space=gymnasium.spaces.Box(-np.inf, np.inf, (4,)),
        action_space=gymnasium.spaces.Discrete(2),
        address=arguments.address,
        token=os.environ.get("RLMESH_RAY_TOKEN"),
        num_simulators=arguments.simulators,
    )
    algorithm = config.build_algo()
    print(f"listening on {algorithm.env_runner.address}", flush=True)
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        mean = runners.get("episode_return_mean", float("nan"))
        print(f"iteration {iteration}: mean return {mean:.1f}", flush=True)
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
