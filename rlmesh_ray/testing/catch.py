"""Catch: a minimal game with pixel observations."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from numpy.typing import NDArray

_ROWS, _COLUMNS = 10, 5
_SIZE = 42


class Catch(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A ball falls down a field of 10 x 5; a paddle in the last row has to be below it.

    The observation is the field as a picture, ``(42, 42, 1) float32``: 1 where the ball or the
    paddle is, else 0. Actions: 0 left, 1 stay, 2 right. The ball starts in a random column, the
    paddle in the middle. An episode takes 9 steps; the last one is rewarded with 1 if the ball was
    caught and with -1 if not, the others with 0. The best mean return is 1; random actions, which
    catch one ball in five, get -0.6.
    """

    def __init__(self) -> None:
        self.observation_space = Box(0.0, 1.0, (_SIZE, _SIZE, 1), np.float32)
        self.action_space = Discrete(3)
        self._row = 0
        self._ball = 0
        self._paddle = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Drop a ball from a random column."""
        super().reset(seed=seed)
        self._row = 0
        self._ball = int(self.np_random.integers(_COLUMNS))
        self._paddle = _COLUMNS // 2
        return self._picture(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Move the paddle, and let the ball fall by a row."""
        self._paddle = int(np.clip(self._paddle + int(action) - 1, 0, _COLUMNS - 1))
        self._row += 1
        has_ended = self._row == _ROWS - 1
        caught = 1.0 if self._paddle == self._ball else -1.0
        return self._picture(), caught if has_ended else 0.0, has_ended, False, {}

    def _picture(self) -> NDArray[np.float32]:
        field = np.zeros((_ROWS, _COLUMNS), np.float32)
        field[self._row, self._ball] = 1.0
        field[-1, self._paddle] = 1.0
        rows = np.arange(_SIZE) * _ROWS // _SIZE
        columns = np.arange(_SIZE) * _COLUMNS // _SIZE
        return np.ascontiguousarray(field[rows][:, columns, np.newaxis])


# gymnasium.make("rlmesh_ray.testing.catch:rlmesh_ray/Catch-v0") imports this module first.
gymnasium.register("rlmesh_ray/Catch-v0", entry_point="rlmesh_ray.testing.catch:Catch")
