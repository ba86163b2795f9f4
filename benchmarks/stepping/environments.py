"""What is stepped: environments whose own cost is known.

Importing this module registers two of them with gymnasium. The third is a vector environment.
"""

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from benchmarks.stepping.catch_game import COLUMNS, ROWS, CatchGame
from benchmarks.stepping.specs import CARTPOLE, CATCH, ENVPOOL, FRAMES, STRAGGLERS

_NUM_FRAMES = 8
_FAST_S, _SLOW_S = 1e-3, 50e-3
_ONE_SLOW_IN = 100
_WAITING_LANES = 8

AnyVectorEnv = gymnasium.vector.VectorEnv[Any, Any, Any]
Stepped = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class Frames(gymnasium.Env[NDArray[Any], np.int64]):
    """Copies a stored frame, as an emulator does. Episodes never end.

    Args:
        shape: Of a frame.
        step_s: How long a step keeps the processor busy; 0: no longer than the copy takes.
        is_float: Whether pixels are float32 from 0 to 1, as RLlib's networks take them; else uint8.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (84, 84, 4),
        step_s: float = 1e-4,
        *,
        is_float: bool = False,
    ) -> None:
        self.action_space = Discrete(6)
        rng = np.random.default_rng(0)
        self._frames: NDArray[Any] = rng.integers(0, 256, (_NUM_FRAMES, *shape), np.uint8)
        if is_float:
            self._frames = self._frames.astype(np.float32) / 255
            self.observation_space = Box(0.0, 1.0, tuple(shape), np.float32)
        else:
            self.observation_space = Box(0, 255, tuple(shape), np.uint8)
        self._step_s = step_s
        self._num_steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Begin with the first frame."""
        super().reset(seed=seed)
        self._num_steps = 0
        return self._frame(), {}

    def step(self, action: np.int64) -> Stepped:
        """Show the next frame."""
        end_s = time.perf_counter() + self._step_s
        self._num_steps += 1
        frame = self._frame()
        while time.perf_counter() < end_s:
            pass
        return frame, 1.0, False, False, {}

    def _frame(self) -> NDArray[Any]:
        frame: NDArray[Any] = self._frames[self._num_steps % _NUM_FRAMES]
        return frame.copy()


class SmallCatch(gymnasium.Env[NDArray[np.float32], np.int64]):
    """``CatchGame``; actions: 0 left, 1 stay, 2 right."""

    def __init__(self) -> None:
        self.observation_space = Box(0.0, 1.0, (ROWS, COLUMNS), np.float32)
        self.action_space = Discrete(3)
        self._game = CatchGame(0)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Let go of a ball."""
        super().reset(seed=seed)
        if seed is not None:
            self._game = CatchGame(seed)
        return self._game.begin(), {}

    def step(self, action: np.int64) -> Stepped:
        """Move the paddle."""
        board, reward, is_down = self._game.move(int(action) - 1)
        return board, reward, is_down, False, {}


class Stragglers(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Waits, as for a simulator elsewhere: 1 ms a step of all lanes, and 50 ms in one of a hundred.

    Every session draws its own slow steps, exactly one in each hundred: short measurements see
    as many of them as long ones. Episodes never end.

    Args:
        num_envs: How many lanes.
    """

    def __init__(self, num_envs: int = _WAITING_LANES) -> None:
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
        self.single_observation_space = Box(-1.0, 1.0, (4,), np.float32)
        self.single_action_space = Discrete(2)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rng = np.random.default_rng()
        self._steps_to_come: list[float] = []

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin."""
        return np.zeros((self.num_envs, 4), np.float32), {}

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_], dict[str, Any]]:
        """Wait."""
        if not self._steps_to_come:
            self._steps_to_come = [_FAST_S] * _ONE_SLOW_IN
            self._steps_to_come[self._rng.integers(_ONE_SLOW_IN)] = _SLOW_S
        time.sleep(self._steps_to_come.pop())
        ended = np.zeros(self.num_envs, np.bool_)
        observations = np.zeros((self.num_envs, 4), np.float32)
        return observations, np.ones(self.num_envs), ended, ended.copy(), {}


def envpool_vector(num_envs: int) -> AnyVectorEnv:
    """Return CartPole as EnvPool has it."""
    import envpool

    vector: AnyVectorEnv = envpool.make_gymnasium(CARTPOLE, num_envs=num_envs, seed=0)
    return vector


def environment(name: str, num_envs: int) -> str | Callable[[], AnyVectorEnv]:
    """Return what an endpoint hosts: a Gymnasium id, or a factory of vector environments."""
    if name == ENVPOOL:
        return functools.partial(envpool_vector, num_envs)
    return Stragglers if name == STRAGGLERS else name


def local_vector(
    name: str, num_envs: int, env_kwargs: Mapping[str, Any], *, has_processes: bool
) -> AnyVectorEnv:
    """Return the same lanes as gymnasium, or EnvPool, has them in a process.

    Args:
        name: As of ``environment``.
        num_envs: How many lanes.
        env_kwargs: Of one environment.
        has_processes: Whether each lane has a process of its own, and shared memory.
    """
    if name == STRAGGLERS:
        return Stragglers(num_envs)
    if name == ENVPOOL:
        return envpool_vector(num_envs)
    mode = "async" if has_processes else "sync"
    return gymnasium.make_vec(
        name,
        num_envs,
        mode,
        vector_kwargs={"shared_memory": True} if has_processes else None,
        **env_kwargs,
    )


gymnasium.register(FRAMES.partition(":")[2], entry_point=f"{__name__}:Frames")
gymnasium.register(CATCH.partition(":")[2], entry_point=f"{__name__}:SmallCatch")
