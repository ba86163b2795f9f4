"""Environments that count. In a module of their own, so that workers need not import Ray."""

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from tests.loopback.eventually import eventually


class Ramp(gymnasium.Env[Any, Any]):
    """Counts its steps and ends after a number that grows with every episode."""

    observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.length = 2
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.length = self.length + 1 if self.length < 9 else 3
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        observation = np.full(1, self.steps, np.float32)
        return observation, float(self.steps), self.steps >= self.length, False, {}


def ramps(mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([Ramp, Ramp, Ramp], autoreset_mode=mode)


class Fragile(Ramp):
    """Raises in the third episode of its life."""

    episodes = 0

    def reset(self, **kwargs: Any) -> Any:
        self.episodes += 1
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        if self.episodes == 3 and self.steps == 1:
            raise RuntimeError("worn out")
        return super().step(action)


class Hopeless(Ramp):
    """Raises on every step."""

    def step(self, action: Any) -> Any:
        raise RuntimeError("never")


class Stairs(gymnasium.Env[Any, Any]):
    """Counts its steps without end, or up to a number.

    Args:
        gate: A file that must exist before each step; None: no such thing.
        log: Gets a byte a step; may be a pipe.
        length: Of an episode.
    """

    observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self, gate: Path | None = None, log: Path | None = None, length: float = np.inf
    ) -> None:
        self.gate, self.log, self.length = gate, log, length
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.gate is not None:
            assert eventually(self.gate.exists, 600.0)
        self.steps += 1
        if self.log is not None:
            with self.log.open("a") as file:
                file.write("x")
        observation = np.full(1, self.steps, np.float32)
        return observation, float(self.steps), self.steps >= self.length, False, {}


class Slippery(Ramp):
    """Gives a reward that is not finite in every fifth step of its life."""

    life = 0

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        self.life += 1
        bad = (np.nan, np.inf, -np.inf)[self.life % 3]
        return observation, reward if self.life % 5 else bad, *rest


class SlipperyChoice(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Observes its step count as a choice out of twenty."""

    def __init__(self) -> None:
        super().__init__(Slippery())
        self.observation_space = spaces.Discrete(20)

    def observation(self, observation: Any) -> Any:
        return np.int64(observation[0])


def slippery_ramps(mode: AutoresetMode) -> SyncVectorEnv:
    return SyncVectorEnv([Slippery] * 3, autoreset_mode=mode)


class Bottomless(Ramp):
    """Gives no finite reward at all."""

    def step(self, action: Any) -> Any:
        observation, _, *rest = super().step(action)
        return observation, np.nan, *rest


class Collapsing(Ramp):
    """Gives a reward that is not finite in the second step of each episode."""

    def step(self, action: Any) -> Any:
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.steps == 2 else reward, *rest


class Ladder(gymnasium.Env[Any, Any]):
    """Observes the rung that it was last set to."""

    observation_space = spaces.Box(0.0, np.inf, (1,), np.float32)
    action_space = spaces.Discrete(2)
    rung = 0

    def set_rung(self, rung: int) -> int:
        former, self.rung = self.rung, rung
        return former

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.full(1, self.rung, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.full(1, self.rung, np.float32), 0.0, False, False, {}
