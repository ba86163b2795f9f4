"""Switch an existing RLlib script to endpoints: two lines, each marked below.

    python examples/switch_an_existing_script.py           # through endpoints, which Ray hosts
    python examples/switch_an_existing_script.py --local   # RLlib's own way, to compare

This is an RLlib script as many are: a callback, a connector that keeps state, EnvRunners,
evaluation, a checkpoint. What has changed are the import and, after all other settings, the call
of ``configure``. ``environment("CartPole-v1")`` may stay. Give an address, as in
``--env 127.0.0.1:5555``, for an endpoint that runs already. Needs the extra ``rllib``:
``pip install ".[rllib]"``.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.env_to_module import MeanStdFilter

from rlmesh_ray.rllib import configure  # <-- the first of the two lines

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--local", action="store_true", help="as before: without endpoints")
parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id, or HOST:PORT")
parser.add_argument("--runners", type=int, default=1, help="EnvRunners for training")
parser.add_argument("--lanes", type=int, default=8, help="environments of each EnvRunner")
parser.add_argument("--iterations", type=int, default=6)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")
parser.add_argument("--out", type=Path, default=Path("runs/switched"), help="gets the checkpoint")


class LongestEpisode(RLlibCallback):
    """Adds a number of its own to the metrics."""

    def on_episode_end(self, *, episode: Any, metrics_logger: Any, **_kwargs: Any) -> None:
        """Count the steps."""
        metrics_logger.log_value("longest_episode", len(episode), reduce="max", window=100)


def main(arguments: argparse.Namespace) -> None:
    """Train, evaluate now and then, save a checkpoint."""
    ray.init(log_to_driver=False)
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(
            num_env_runners=arguments.runners,
            num_envs_per_env_runner=arguments.lanes,
            env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
        )
        .training(
            lr=1e-3,
            gamma=0.99,
            lambda_=0.9,
            train_batch_size_per_learner=arguments.batch,
            minibatch_size=min(256, arguments.batch),
            num_epochs=10,
        )
        .evaluation(
            evaluation_interval=2,
            evaluation_num_env_runners=1,
            evaluation_duration=10,
            evaluation_config=PPOConfig.overrides(explore=False),
        )
        .callbacks(LongestEpisode)
    )
    if not arguments.local:
        configure(config, arguments.env)  # <-- the second of the two lines

    algorithm = config.build_algo()
    for iteration in range(1, arguments.iterations + 1):
        result = algorithm.train()
        runners = result["env_runners"]
        line = f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}"
        line += f", longest episode {runners['longest_episode']:.0f} steps"
        if iteration % 2 == 0:
            evaluated = result["evaluation"]["env_runners"]["episode_return_mean"]
            line += f", evaluated at {evaluated:.1f}"
        print(line, flush=True)
    print("checkpoint:", algorithm.save_to_path(str(arguments.out.resolve())))
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
