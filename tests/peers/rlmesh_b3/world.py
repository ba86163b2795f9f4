"""The environment of these tests, for both sides: it needs gymnasium and NumPy, and no peer."""

from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import concatenate, create_empty_array

EPISODE_STEPS = 4


class World(gymnasium.Env[dict[str, Any], dict[str, Any]]):
    """Every kind of space on both ways; what comes back depends on the seed and the actions."""

    observation_space = spaces.Dict(
        {
            "camera": spaces.Box(0, 255, (2, 3, 3), np.uint8),
            "position": spaces.Box(-np.inf, np.inf, (2,), np.float32),
            "clock": spaces.Box(0, 2**62, (1,), np.int64),
            "last": spaces.Tuple(
                [spaces.Discrete(3), spaces.Text(4, min_length=1, charset="abc ")]
            ),
            "flags": spaces.MultiBinary(4),
            "wheels": spaces.MultiDiscrete([3, 5]),
            "level": spaces.Discrete(5, start=-2),
        }
    )
    action_space = spaces.Dict(
        {
            "move": spaces.Discrete(3),
            "push": spaces.Box(-1, 1, (2,), np.float32),
            "say": spaces.Tuple([spaces.Text(3, min_length=1, charset="abc"), spaces.Discrete(2)]),
        }
    )
    render_mode = "rgb_array"

    def __init__(self) -> None:
        # Its own: gymnasium's vector environments write into it.
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
        self._steps = 0
        self._position = np.zeros(2, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = int((options or {}).get("steps", 0))
        self._position = self.np_random.normal(size=2).astype(np.float32)
        return self._observation(0, "a"), {"options": dict(options or {})}

    def step(
        self, action: dict[str, Any]
    ) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._position = self._position + np.asarray(action["push"], np.float32)
        move, (word, bit) = int(action["move"]), action["say"]
        reward = float(self._position.sum()) + move
        terminated, truncated = move == 2, self._steps == EPISODE_STEPS
        info = {"steps": self._steps, "bit": int(bit), "word": word}
        return self._observation(move, word), reward, terminated, truncated, info

    def render(self) -> Any:
        """Return a picture, (2, 2, 3) uint8, one colour that tells the step."""
        return np.full((2, 2, 3), self._steps, np.uint8)

    def _observation(self, move: int, word: str) -> dict[str, Any]:
        rng = self.np_random
        return {
            "camera": rng.integers(0, 256, (2, 3, 3), np.uint8),
            "position": self._position.copy(),
            "clock": np.array([2**61 + self._steps]),
            "last": (move, word),
            "flags": rng.integers(0, 2, 4, np.int8),
            "wheels": rng.integers([0, 0], [3, 5]),
            "level": int(rng.integers(-2, 3)),
        }


def actions(seed: int, count: int) -> list[dict[str, Any]]:
    """Return ``count`` actions of World, the same ones for the same seed everywhere."""
    rng = np.random.default_rng(seed)
    return [
        {
            "move": int(rng.integers(0, 3)) if step % 3 == 2 else 1,
            "push": rng.uniform(-1, 1, 2).astype(np.float32),
            "say": ("abc"[: int(rng.integers(1, 4))], int(rng.integers(0, 2))),
        }
        for step in range(count)
    ]


def batches(num_lanes: int, count: int) -> list[Any]:
    """Return ``count`` batches of actions, as gymnasium's vector environments take them."""
    lanes = [actions(seed, count) for seed in range(num_lanes)]
    out = create_empty_array(World.action_space, num_lanes)
    return [
        deepcopy(concatenate(World.action_space, list(row), out))
        for row in zip(*lanes, strict=True)
    ]


def play(env: Any, space: Any, actions: list[Any], **reset: Any) -> list[Any]:
    """Reset ``env`` and apply ``actions``.

    Args:
        env: Anything with gymnasium's interface. One lane is reset again wherever its episode
            ends, several do as their autoreset mode says.
        space: Of an observation of one lane.
        actions: To apply.
        reset: For the first reset.

    Returns:
        What happened, in a form that JSON keeps exactly.
    """
    observation, info = env.reset(**reset)
    trace = [[reported(space, observation), plain(info)]]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        outcome = [plain(part) for part in (reward, terminated, truncated, info)]
        trace.append([reported(space, observation), *outcome])
        if np.ndim(terminated) == 0 and (terminated or truncated):
            observation, info = env.reset()
            trace.append([reported(space, observation), plain(info)])
    return trace


def reported(space: gymnasium.Space[Any], value: Any) -> Any:
    """Return a value or batch of ``space`` for JSON: arrays with their dtype, the rest without.

    Numbers of Discrete spaces and strings come as arrays, lists or tuples, as each peer likes.
    """
    if isinstance(space, spaces.Dict):
        return {key: reported(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [reported(part, value[index]) for index, part in enumerate(space.spaces)]
    if isinstance(space, spaces.Discrete | spaces.Text):
        return plain(value)
    return [str(value.dtype), value.tolist()]


def plain(value: Any) -> Any:
    """Return infos and numbers for JSON, which knows neither arrays nor tuples."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
