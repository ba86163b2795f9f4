"""Train PPO on any server of dm_env_rpc, DeepMind's protocol.

    python examples/train_on_dm_env_rpc.py dm_env_rpc://127.0.0.1:10000 --lanes 8

Each lane is an agent in a world of its own. Servers of remote-gym, for one, send TERMINATED at
their time limits as well; --time-limit distinguishes such ends from real ones. Settings of a
server to create or to join a world are written as JSON: --create '{"seed": 7}'. Needs the extras
``rllib`` and ``dm-env-rpc``: ``pip install ".[rllib,dm-env-rpc]"``.
"""

import argparse
import json

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import DmEnvRpcSettings
from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("addresses", nargs="+", help="dm_env_rpc://HOST:PORT of each server")
parser.add_argument("--lanes", type=int, default=4, help="of each server")
parser.add_argument("--create", type=json.loads, default={}, help="settings, as JSON")
parser.add_argument("--join", type=json.loads, default={}, help="settings, as JSON")
parser.add_argument("--time-limit", type=int, default=None, help="steps of the longest episode")
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
    settings = DmEnvRpcSettings(
        num_envs=arguments.lanes,
        create=arguments.create,
        join=arguments.join,
        time_limit_steps=arguments.time_limit,
        # RLlib's default modules take no Dict, and number actions from 0.
        is_bare=True,
        choices_from_zero=True,
    )
    configure(config, arguments.addresses, dm_env_rpc=settings)
    algorithm = config.build_algo()
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        print(f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}")
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
