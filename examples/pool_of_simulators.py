r"""Train on simulators that register themselves: no list names them, and they may come and go.

Make a token, and copy the file to each simulator's machine:

    python -c "import secrets; print(secrets.token_urlsafe())" > pool-token; chmod 600 pool-token

Here, where Ray and RLlib are (``pip install ".[rllib]"``), on an address of this machine:

    python examples/pool_of_simulators.py --address 192.0.2.1:7070 --token-file pool-token

On each simulator's machine, which needs the base install only (``pip install .``):

    rlmesh-ray serve-env CartPole-v1 --num-envs 4 --address 192.0.2.7:0 \
        --register simulators@192.0.2.1:7070 --pool-token-file pool-token

Training begins when the first ones are there. More of them may be started while it runs, and any of
them stopped or started again, on any machine: sessions move to where there is room.
"""

import argparse
import sys
from pathlib import Path

import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import RlmeshError, TokenFile
from rlmesh_ray.actors import EnvPool
from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--address", default="127.0.0.1:7070", help="where simulators register")
parser.add_argument("--token-file", type=Path, required=True, help="holds the pool's token")
parser.add_argument("--wait-for", type=int, default=1, help="simulators to begin with")
parser.add_argument("--timeout", type=float, default=600.0, help="seconds to wait for them")
parser.add_argument("--sessions", type=int, default=4, help="of the EnvRunner, over all simulators")
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns, and the registered simulators."""
    ray.init(log_to_driver=False)
    try:
        pool = EnvPool(
            "simulators", address=arguments.address, token=TokenFile(arguments.token_file)
        )
        print(f"waiting for: {pool.command}", flush=True)
        pool.wait(arguments.wait_for, arguments.timeout)
        config = PPOConfig().training(
            lr=1e-3,
            gamma=0.99,
            lambda_=0.9,
            train_batch_size_per_learner=arguments.batch,
            minibatch_size=min(256, arguments.batch),
            num_epochs=10,
        )
        config.env_runners(num_env_runners=1, num_envs_per_env_runner=4 * arguments.sessions)
        configure(config, pool)
    except RlmeshError as error:
        sys.exit(f"error: {error}")
    algorithm = config.build_algo()
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        names = " ".join(record.endpoint_id.rpartition("/")[2] for record in pool.endpoints)
        print(
            f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}, "
            f"simulators: {names}",
            flush=True,
        )
    algorithm.stop()
    pool.stop()


if __name__ == "__main__":
    main(parser.parse_args())
