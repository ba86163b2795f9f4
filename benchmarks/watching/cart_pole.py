"""A CartPole that draws itself without pygame."""

import math
from typing import Any

import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from PIL import Image, ImageDraw

WIDTH, HEIGHT = 600, 400


class DrawnCartPole(CartPoleEnv):
    """CartPole-v1 with pictures of 600 x 400.

    Args:
        scale: Part of that size that its pictures have.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(render_mode="rgb_array")
        self._size = round(WIDTH * scale), round(HEIGHT * scale)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        self._steps = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        """Step; the episode is truncated after 500 steps, as that of CartPole-v1."""
        observation, reward, terminated, _, info = super().step(action)
        self._steps += 1
        return observation, reward, terminated, self._steps >= 500, info

    def render(self) -> Any:
        """Return the picture."""
        image = Image.new("RGB", (WIDTH, HEIGHT), "white")
        draw = ImageDraw.Draw(image)
        state = self.state if self.state is not None else (0.0, 0.0, 0.0, 0.0)
        x, angle = WIDTH / 2 + float(state[0]) * WIDTH / 4.8, float(state[2])
        draw.line([(0, 300), (WIDTH, 300)], "black")
        draw.rectangle([x - 25, 285, x + 25, 315], "black")
        tip = (x + 125 * math.sin(angle), 293 - 125 * math.cos(angle))
        draw.line([(x, 293), tip], (202, 152, 101), 10)
        draw.ellipse([x - 5, 288, x + 5, 298], (129, 132, 203))
        return np.asarray(image.resize(self._size))
