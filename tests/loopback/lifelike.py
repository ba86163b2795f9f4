"""Environments that tell what is done to them."""

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from rlmesh_ray.testing.envs import Fault, FaultyEnv
from tests.loopback.eventually import eventually


class Lifelike(gymnasium.Env[Any, Any]):
    """Observes its step count and tells its process; ends with action 1."""

    observation_space = spaces.Box(0, 1000, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._count = 0
        return np.zeros(1, np.float32), {"pid": os.getpid()}

    def step(self, action: Any) -> Any:
        self._count += 1
        observation = np.full(1, self._count, np.float32)
        return observation, 1.0, bool(action), False, {"count": self._count}

    def count(self) -> int:
        return self._count


class Gated(Lifelike):
    """Waits in each step for as long as the file ``gate`` is not there."""

    def __init__(self, gate: str) -> None:
        self._gate = gate

    def step(self, action: Any) -> Any:
        Path(self._gate).with_suffix(".begun").touch()
        assert eventually(Path(self._gate).exists, 600.0)
        return super().step(action)


class Breakable(FaultyEnv):
    """Goes wrong where the reset's options say: at the reset itself (0) or at a step."""

    def __init__(self) -> None:
        super().__init__(Fault.PRINT, at_step=-1)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        wanted = options or {"fault": "PRINT", "at_step": -1}
        self._fault, self._at_step = Fault[wanted["fault"]], wanted["at_step"]
        return super().reset(seed=seed)
