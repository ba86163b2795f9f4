"""Environments for tests: EchoEnv for any space, and FaultyEnv, which fails on demand.

Both are seeded, cheap, and picklable, so that a worker process can get them as an instance or from
a factory.
"""

import ctypes
import enum
import os
import threading
import zlib
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space, Text
from numpy.typing import NDArray

_FRAME_SHAPE = (6, 8, 3)


class EchoEnv(gymnasium.Env[Any, Any]):
    """An environment with any spaces, whose results depend on its seed and on every action.

    Observations are samples of the observation space, from a generator that depends on the seed
    and on all actions. The reward is a digest of the action. Episodes have random lengths and end
    by termination or truncation, alternately. Infos have a number, an array, a nested mapping, and
    a key in some steps only.

    Args:
        observation_space: Any space that can be sampled; copied.
        action_space: Action space; by default the observation space.
        max_length: Longest episode, in steps.
        render_mode: None, or ``"rgb_array"``: frames ``(6, 8, 3) uint8`` of the step count.
    """

    def __init__(
        self,
        observation_space: Space[Any],
        action_space: Space[Any] | None = None,
        *,
        max_length: int = 8,
        render_mode: str | None = None,
    ) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 30}
        self.observation_space = deepcopy(observation_space)
        self.action_space = deepcopy(observation_space if action_space is None else action_space)
        self.render_mode = render_mode
        self._max_length = max_length
        self._length = 0
        self._step_count = 0
        self._episode_count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; options come back as infos."""
        super().reset(seed=seed)
        self._length = int(self.np_random.integers(1, self._max_length + 1))
        self._step_count = 0
        self._episode_count += 1
        return self._observation(0), {"length": self._length, **(options or {})}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step; one after the end goes on, as gymnasium's own environments do."""
        digest = action_digest(action)
        self._step_count += 1
        has_ended = self._step_count >= self._length
        is_termination = self._episode_count % 2 == 1
        observation = self._observation(digest)
        infos: dict[str, Any] = {
            "step": self._step_count,
            "draws": self.np_random.random(2),
            "nested": {"digest": digest, "name": f"step {self._step_count}"},
        }
        if digest % 3 == 0:
            infos["now_and_then"] = digest / 3
        return (
            observation,
            digest / 2**32,
            has_ended and is_termination,
            has_ended and not is_termination,
            infos,
        )

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]  # None: no render mode
        """Return a frame filled with the step count."""
        if self.render_mode is None:
            return None
        return np.full(_FRAME_SHAPE, self._step_count, np.uint8)

    def _observation(self, digest: int) -> Any:
        self.observation_space.seed(int(self.np_random.integers(2**31)) ^ (digest >> 1))
        return self.observation_space.sample()


def action_digest(action: Any) -> int:
    """Return 32 bits that depend on every bit, and on the dtype, of a nested action."""
    if isinstance(action, dict):
        return zlib.crc32(repr([(key, action_digest(action[key])) for key in action]).encode())
    if isinstance(action, tuple):
        return zlib.crc32(repr([action_digest(part) for part in action]).encode())
    if isinstance(action, str):
        return zlib.crc32(action.encode())
    array = np.asarray(action)
    return zlib.crc32(array.tobytes(), zlib.crc32(array.dtype.str.encode()))


class Fault(enum.Enum):
    """Kind of failure of a FaultyEnv."""

    RAISE = enum.auto()
    """``ValueError``"""
    SYSTEM_EXIT = enum.auto()
    KEYBOARD_INTERRUPT = enum.auto()
    EXIT = enum.auto()
    """``os._exit(3)``"""
    ABORT = enum.auto()
    SEGFAULT = enum.auto()
    HANG = enum.auto()
    """Waits for ever."""
    SPIN = enum.auto()
    """Blocks for ever in native code that keeps the interpreter lock."""
    NAN = enum.auto()
    """The observation is NaN."""
    OUT_OF_RANGE = enum.auto()
    """The observation is above its bound."""
    NAN_REWARD = enum.auto()
    INFINITE_REWARD = enum.auto()
    WRONG_SHAPE = enum.auto()
    """The observation has another shape."""
    ODD_INFO = enum.auto()
    """The infos have a lock and a lambda, which cannot be pickled."""
    PRINT = enum.auto()
    """Prints to standard output."""


class FaultyEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Counts its steps, and fails at one of them.

    Observation: ``(1,) float32``, the step count of the episode divided by 100. Action: 0 or 1,
    without effect. Episodes never end by themselves.

    Args:
        fault: Kind of failure.
        at_step: Step of each episode at which it fails; 0: the reset.
    """

    def __init__(self, fault: Fault, at_step: int = 1) -> None:
        self.observation_space = Box(0.0, 1.0, (1,), np.float32)
        self.action_space = Discrete(2)
        self._fault = fault
        self._at_step = at_step
        self._step_count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self._step_count = 0
        return self._outcome()

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Count a step."""
        self._step_count += 1
        observation, infos = self._outcome()
        reward = 1.0
        if self._step_count == self._at_step:
            reward = _BAD_REWARDS.get(self._fault, reward)
        return observation, reward, False, False, infos

    def _outcome(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        observation = np.full(1, self._step_count / 100, np.float32)
        infos: dict[str, Any] = {}
        if self._step_count == self._at_step:
            if self._fault in _BREAKDOWNS:
                _BREAKDOWNS[self._fault]()
            if self._fault is Fault.ODD_INFO:
                infos = {"lock": threading.Lock(), "function": lambda: 0, "number": 1}
            observation = _BAD_OBSERVATIONS.get(self._fault, observation)
        return observation, infos


_BAD_REWARDS = {Fault.NAN_REWARD: np.nan, Fault.INFINITE_REWARD: -np.inf}
_BAD_OBSERVATIONS: dict[Fault, NDArray[np.float32]] = {
    Fault.NAN: np.full(1, np.nan, np.float32),
    Fault.OUT_OF_RANGE: np.full(1, 2.0, np.float32),
    Fault.WRONG_SHAPE: np.zeros(2, np.float32),
}


def _raise(error: BaseException) -> None:
    raise error


def _spin() -> None:
    # PyDLL keeps the lock; pause() returns only for a signal with a handler.
    while True:
        ctypes.PyDLL(None).pause()


_BREAKDOWNS: dict[Fault, Callable[[], object]] = {
    Fault.RAISE: lambda: _raise(ValueError("the environment\nis broken")),
    Fault.SYSTEM_EXIT: lambda: _raise(SystemExit(3)),
    Fault.KEYBOARD_INTERRUPT: lambda: _raise(KeyboardInterrupt()),
    Fault.EXIT: lambda: os._exit(3),
    Fault.ABORT: os.abort,
    Fault.SEGFAULT: lambda: ctypes.string_at(0),
    Fault.HANG: lambda: threading.Event().wait(),
    Fault.SPIN: _spin,
    Fault.PRINT: lambda: print("printed by the environment"),  # noqa: T201  # the point of it
}


SPACES: dict[str, Space[Any]] = {
    "box": Box(-2.0, 3.0, (2, 3), np.float32),
    "box of one number": Box(-1.0, 1.0, (), np.float64),
    "unbounded box": Box(-np.inf, np.inf, (3,), np.float64),
    "image": Box(0, 255, (4, 5, 3), np.uint8),
    "discrete": Discrete(5, start=-2),
    "multi-binary": gymnasium.spaces.MultiBinary((2, 3)),
    "multi-discrete": gymnasium.spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "text": Text(6, min_length=1, charset="abcé"),
    "dict": gymnasium.spaces.Dict(
        {"b": Box(-1.0, 1.0, (2,), np.float32), "a": Discrete(3), "name": Text(4)}
    ),
    "tuple": gymnasium.spaces.Tuple((Discrete(2), Box(0.0, 1.0, (1,), np.float32))),
    "nested": gymnasium.spaces.Dict(
        {
            "z": gymnasium.spaces.Tuple(
                (Text(3), gymnasium.spaces.Dict({"deep": Box(-1.0, 1.0, (2, 2), np.float64)}))
            ),
            "a": gymnasium.spaces.MultiBinary(3),
        }
    ),
}
"""One space of every kind that a contract can express, by name."""
