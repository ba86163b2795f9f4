"""Train PPO on a fleet: Ray hosts the endpoints, RLlib samples from them.

    python examples/train_on_fleet.py --env CartPole-v1 --endpoints 2 --out runs/fleet

On a cluster (``ray up cluster.yaml``) the same script runs as it is: the endpoints go where
there is room. Needs the extra ``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id")
parser.add_argument("--endpoints", type=int, default=2, help="how many; one CPU each")
parser.add_argument("--lanes", type=int, default=16, help="environments that each steps at once")
parser.add_argument("--iterations", type=int, default=30)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")
parser.add_argument("--out", type=Path, default=Path("runs/fleet"), help="gets the checkpoint")


def main(arguments: argparse.Namespace) -> None:
    """Start the fleet, train, save a checkpoint."""
    ray.init(log_to_driver=False)
    with EnvFleet(
        arguments.env, num_endpoints=arguments.endpoints, num_envs=arguments.lanes
    ) as fleet:
        print("endpoints:", ", ".join(fleet.addresses))
        config = PPOConfig().training(
            lr=1e-3,
            gamma=0.99,
            lambda_=0.9,
            train_batch_size_per_learner=arguments.batch,
            minibatch_size=min(256, arguments.batch),
            num_epochs=10,
        )
        # num_env_runners=0: the driver samples from all endpoints. More runners share them.
        algorithm = configure(config.env_runners(num_env_runners=0), fleet).build_algo()
        for iteration in range(1, arguments.iterations + 1):
            runners = algorithm.train()["env_runners"]
            print(f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}")
        print("checkpoint:", algorithm.save_to_path(str(arguments.out.resolve())))
        algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
