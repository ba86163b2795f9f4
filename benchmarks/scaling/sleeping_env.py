"""A simulator whose time is not this machine's: it sleeps, so that cores are not the limit."""

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

_NUM_ROWS = 16


class Simulator(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Steps all its lanes at once, as one simulator with several agents' worlds does.

    Observations are copied from stored ones, as from a renderer. Lanes end their episodes one after
    the other, each after ``episode_length`` steps, so that no moment differs from the others.

    Args:
        num_envs: How many lanes.
        step_s: How long a step of all lanes sleeps.
        observation_bytes: Of a lane's observation, a multiple of 4: float32.
        episode_length: Steps.
    """

    def __init__(
        self,
        num_envs: int = 8,
        step_s: float = 0.02,
        observation_bytes: int = 4096,
        episode_length: int = 200,
    ) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = Box(-1.0, 1.0, (observation_bytes // 4,), np.float32)
        self.single_action_space = Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._step_s = step_s
        self._episode_length = episode_length
        rng = np.random.default_rng(0)
        shape = (_NUM_ROWS, num_envs, observation_bytes // 4)
        self._rows: NDArray[np.float32] = rng.uniform(-1.0, 1.0, shape).astype(np.float32)
        self._first_steps = np.arange(num_envs) * episode_length // num_envs
        self._steps = self._first_steps.copy()
        self._is_over = np.zeros(num_envs, np.bool_)
        self._num_steps = 0

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin in all lanes."""
        self._steps = self._first_steps.copy()
        self._is_over[:] = False
        return self._observation(), {}

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Sleep; lanes that were over begin anew."""
        time.sleep(self._step_s)
        self._num_steps += 1
        self._steps = np.where(self._is_over, 0, self._steps + 1)
        rewards = np.where(self._is_over, 0.0, 1.0)
        self._is_over = self._steps >= self._episode_length
        truncated = np.zeros(self.num_envs, np.bool_)
        return self._observation(), rewards, self._is_over.copy(), truncated, {}

    def _observation(self) -> NDArray[np.float32]:
        rows: NDArray[np.float32] = self._rows[self._num_steps % _NUM_ROWS]
        return rows.copy()
