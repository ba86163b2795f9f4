"""A robot with two cameras, and a policy for it: ``python -m benchmarks.robots.cameras HOST``."""

import sys
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from PIL import Image

from benchmarks.control import stay
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.model.model_server import ModelServer

_HEIGHT, _WIDTH = 480, 640


class Robot(gymnasium.Env[Any, Any]):
    """The spaces of the robot."""

    observation_space = spaces.Dict(
        {name: spaces.Box(0, 255, (_HEIGHT, _WIDTH, 3), np.uint8) for name in ("front", "wrist")}
    )
    action_space = spaces.Box(-1.0, 1.0, (7,), np.float32)


def observation(seed: int) -> dict[str, Any]:
    """Return a batch of one row: soft shapes with the noise of a camera."""
    random = np.random.default_rng(seed)
    images = {}
    for name in Robot.observation_space:
        shapes = Image.fromarray(random.integers(0, 256, (12, 16, 3), np.uint8))
        pixels = np.asarray(shapes.resize((_WIDTH, _HEIGHT), Image.Resampling.BICUBIC))
        noisy = pixels + random.normal(0.0, 4.0, pixels.shape)
        images[name] = noisy.clip(0, 255).astype(np.uint8)[None]
    return images


def act(observations: Any) -> Any:
    """Return no movement at once: the link alone is measured."""
    return np.zeros((len(observations["front"]), 7), np.float32)


if __name__ == "__main__":
    with ModelServer(act, address=f"{sys.argv[1]}:0", token=False) as server:
        freeze_heap()
        stay(server.address)
