"""Train on images: bytes on the wire, floats for the network, a CNN, several frames in a row.

    python examples/train_from_images.py

A ball falls, and a paddle is to catch it. The policy sees grey pictures of 42 x 42 pixels, as
uint8. Random actions get a mean return of -0.6, the best policy 1. Needs the extra ``rllib``:
``pip install ".[rllib]"``.
"""

import argparse
from typing import Any

import gymnasium
import numpy as np
import ray
import torch
from gymnasium.spaces import Box
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.env_to_module.observation_preprocessor import (
    SingleAgentObservationPreprocessor,
)
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmesh_ray.rllib import configure

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
parser.add_argument("--frames", type=int, default=2, help="how many pictures the policy sees")
parser.add_argument("--in-module", action="store_true", help="make floats in the module")
parser.add_argument("--lanes", type=int, default=16, help="environments that are stepped together")
parser.add_argument("--iterations", type=int, default=20)
parser.add_argument("--batch", type=int, default=1024, help="steps of an iteration")
parser.add_argument("--out", help="gets the checkpoint")


class Camera(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows Catch as cameras do: (height, width, 1) uint8, 0 to 255."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("rlmesh_ray.testing.catch:rlmesh_ray/Catch-v0"))
        self.observation_space = Box(0, 255, (42, 42, 1), np.uint8)

    def observation(self, observation: Any) -> Any:
        """Return bytes."""
        return (255 * observation).astype(np.uint8)


class ScalePixels(SingleAgentObservationPreprocessor):
    """Makes floats from 0 to 1 of uint8 images, in the runner. The learner gets them, too."""

    def recompute_output_observation_space(
        self, input_observation_space: Any, input_action_space: Any
    ) -> Any:
        """Return the space of the floats."""
        return Box(0.0, 1.0, input_observation_space.shape, np.float32)

    def preprocess(self, observation: Any, episode: Any) -> Any:
        """Scale one image."""
        return np.asarray(observation, np.float32) / 255


class PixelModule(DefaultPPOTorchRLModule):
    """PPO's default module for uint8 images: it makes the floats itself."""

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return super()._forward(scaled(batch), **kwargs)

    def _forward_train(self, batch: Any, **kwargs: Any) -> Any:
        return super()._forward_train(scaled(batch), **kwargs)

    def compute_values(self, batch: Any, embeddings: Any = None) -> Any:
        """Return the values of the states."""
        return super().compute_values(scaled(batch), embeddings)


def scaled(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch with its images as floats."""
    return {**batch, Columns.OBS: batch[Columns.OBS].float() / 255}


def make_config(arguments: argparse.Namespace) -> PPOConfig:
    """Return a config for images; ``configure`` then adds the endpoints."""
    num_frames = arguments.frames
    config = PPOConfig().training(
        lr=1e-3,
        gamma=0.95,
        train_batch_size_per_learner=arguments.batch,
        minibatch_size=min(256, arguments.batch),
        num_epochs=4,
    )
    # Filters, size and stride of each layer.
    config.rl_module(
        model_config=DefaultModelConfig(
            conv_filters=[[16, 4, 2], [32, 4, 2], [32, 3, 2]],
            head_fcnet_hiddens=[128],
        )
    )

    connectors: list[Any] = []
    if arguments.in_module:
        config.rl_module(rl_module_spec=RLModuleSpec(module_class=PixelModule))
    else:
        connectors.append(ScalePixels)
    if num_frames > 1:
        connectors.append(lambda: FrameStackingEnvToModule(num_frames=num_frames))
        # The learner stacks again: single frames travel to it.
        config.learners(
            learner_connector=lambda observation_space, action_space: FrameStackingLearner(
                num_frames=num_frames
            )
        )
        # A batch may end within an episode. The next one begins with these frames.
        config.env_runners(episode_lookback_horizon=num_frames)
    if connectors:
        config.env_runners(
            env_to_module_connector=lambda env, spaces, device: [make() for make in connectors]
        )
    return config


def main(arguments: argparse.Namespace) -> None:
    """Train and print the mean returns."""
    torch.set_num_threads(1)
    ray.init(log_to_driver=False)
    config = make_config(arguments).env_runners(num_env_runners=0).debugging(seed=1)
    algorithm = configure(config, Camera, num_envs=arguments.lanes).build_algo()
    for iteration in range(1, arguments.iterations + 1):
        runners = algorithm.train()["env_runners"]
        print(f"iteration {iteration}: mean return {runners['episode_return_mean']:.2f}")
    print("fast path:", algorithm.env_runner.fast_path_disabled_reason or "taken")
    if arguments.out:
        print("checkpoint:", algorithm.save_to_path(arguments.out))
    algorithm.stop()


if __name__ == "__main__":
    main(parser.parse_args())
