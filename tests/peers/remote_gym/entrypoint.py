"""What a remote-gym server serves; imported by it, in its own virtual environment."""

from typing import Any

import gymnasium
import numpy as np


class _Seeded(gymnasium.Wrapper):
    """Begins with a seed, which remote-gym does not carry."""

    # remote-gym asks for what gymnasium has no more, and sends it as float32.
    reward_range = (np.float32(-np.inf), np.float32(np.inf))

    def __init__(self, env: Any, seed: int | None) -> None:
        super().__init__(env)
        self._seed = seed

    def reset(self, **_options: Any) -> Any:
        seed, self._seed = self._seed, None
        return self.env.reset(seed=seed)


def create_environment(name: str = "CartPole-v1", seed: int | None = None, **_others: Any) -> Any:
    """Return an environment; remote-gym calls this once for each world."""
    return _Seeded(gymnasium.make(name), seed)
