"""Train PPO on endpoints that are running already, on this machine or elsewhere.

    rlmesh-ray serve-env CartPole-v1 --num-envs 16 --address 127.0.0.1:5555   # over there
    python examples/train_on_endpoint.py 127.0.0.1:5555                       # here

Width, spaces and autoreset mode are the endpoint's. An endpoint that other machines can reach
needs a token; here it comes from the variable RLMESH_RAY_TOKEN. Needs the extra ``rllib``:
``pip install ".[rllib]"``.
"""

import argparse
import os

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("addresses", nargs="+", help="HOST:PORT of each endpoint")
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns."""
    ray.init(log_to_driver=False)
    config = PPOConfig().training(
        lr=1e-3,
        gamma=0.99,
        lambda_=0.9,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=10,
    )
    config.env_runners(num_env_runners=0)
    configure(config, arguments.addresses, token=os.environ.get("RLMESH_RAY_TOKEN"))
    algorithm = config.build_algo()
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        print(f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}")
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
