"""Train PPO and serve it meanwhile: an outside program always gets the newest policy's actions.

    python examples/serve_while_training.py --env CartPole-v1 --iterations 10

The outside program is a thread here to keep the example short. It uses nothing but an address
and a token: elsewhere, it needs the base install only, neither Ray nor torch. Training needs the
extra ``rllib``: ``pip install ".[rllib]"``.
"""

import argparse
import tempfile
import threading

import gymnasium
import numpy as np
import ray
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import RemoteModel, TokenFile
from rlmesh_ray.actors import ModelFleet
from rlmesh_ray.rllib import publish_weights

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--env", default="CartPole-v1", help="a Gymnasium id")
parser.add_argument("--replicas", type=int, default=1, help="processes that serve; one CPU each")
parser.add_argument("--iterations", type=int, default=10)
parser.add_argument("--batch", type=int, default=2048, help="steps of an iteration")


class OutsideProgram(threading.Thread):
    """Plays with the actions of the served policy until it must end."""

    def __init__(self, address: str, token: str | TokenFile, env_id: str) -> None:
        super().__init__()
        self.versions: list[int] = []
        self.must_end = threading.Event()
        self._model = RemoteModel(address, token=token)
        self._envs = gymnasium.make_vec(env_id, num_envs=4)

    def run(self) -> None:
        """Ask for actions and step with them until it must end."""
        self._model.configure_route(self._envs)
        observations, _ = self._envs.reset(seed=0)
        while not self.must_end.is_set():
            actions = self._model.predict(observations)
            observations, *_ = self._envs.step(actions)
            # Each answer says which version of the policy has acted.
            telemetry = self._model.last_telemetry()
            if telemetry is not None:
                self.versions.append(telemetry.policy_version)
        self._model.close()
        self._envs.close()


def main(arguments: argparse.Namespace) -> None:
    """Serve the untrained policy, train, and watch the version grow outside."""
    ray.init(log_to_driver=False)
    config = PPOConfig().environment(arguments.env).env_runners(num_env_runners=0)
    config.training(
        lr=1e-3,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=10,
    )
    algorithm = config.build_algo()
    # Replicas are made of a checkpoint; weights are sent to them afterwards.
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = algorithm.save_to_path(folder)
        with ModelFleet(checkpoint, name="learner", num_replicas=arguments.replicas) as fleet:
            print("serving on", ", ".join(fleet.addresses))
            publish_weights(algorithm, fleet)
            outside = OutsideProgram(fleet.addresses[0], fleet.token, arguments.env)
            outside.start()
            for iteration in range(1, arguments.iterations + 1):
                runners = algorithm.train()["env_runners"]
                newest = max(outside.versions, default=0)
                print(
                    f"iteration {iteration}: mean return {runners['episode_return_mean']:.1f}; "
                    f"outside, version {newest} acts"
                )
            # Sends the last weights and waits for them.
            algorithm.stop()
            print("the served policy is version", fleet.policy_version)
            outside.must_end.set()
            outside.join()
    versions, counts = np.unique(outside.versions, return_counts=True)
    for version, count in zip(versions, counts, strict=True):
        print(f"version {version} chose actions {count} times")


if __name__ == "__main__":
    main(parser.parse_args())
