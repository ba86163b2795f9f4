"""An environment that does as its action says, also what environments should not; both sides."""

import enum
import os
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

HANG_S = 5.0
"""Longer than tests wait, by what a busy machine takes."""
PLAIN_STEPS = 5


class Deed(enum.IntEnum):
    """What an action makes the environment do."""

    STEP = 0
    RAISE = 1
    HANG = 2
    EXIT = 3
    OBSERVE_NAN = 4
    OBSERVE_BEYOND = 5
    TELL_A_HUGE_NUMBER = 6
    TELL_AN_OBJECT = 7
    SUCCEED = 8


class Trouble(gymnasium.Env[Any, int]):
    """Ends after five steps, or when it succeeds; observes the seed and the number of the step."""

    observation_space = spaces.Box(-100, 100, (2,), np.float32)
    action_space: spaces.Discrete = spaces.Discrete(len(Deed))

    def __init__(self, render_mode: str | None = None) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
        self.render_mode = render_mode
        self._steps = 0
        self._seed = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin; ``options["hang"]`` makes it hang."""
        super().reset(seed=seed)
        self._steps, self._seed = 0, -1 if seed is None else seed
        if (options or {}).get("hang"):
            time.sleep(HANG_S)
        return self._observation(), {"seed": self._seed}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Do as ``action`` says."""
        self._steps += 1
        deed = Deed(int(action))
        _do(deed)
        observation, info = self._observation(), {"steps": self._steps, **_TOLD.get(deed, {})}
        observation[0] = _OBSERVED.get(deed, observation[0])
        terminated, truncated = deed is Deed.SUCCEED, self._steps == PLAIN_STEPS
        return observation, float(self._steps), terminated, truncated, info

    def render(self) -> Any:
        """Return a picture, (4, 4, 3) uint8, that tells the step."""
        return np.full((4, 4, 3), self._steps, np.uint8) if self.render_mode else None

    def _observation(self) -> Any:
        return np.array([self._seed, self._steps], np.float32)


_OBSERVED = {Deed.OBSERVE_NAN: np.nan, Deed.OBSERVE_BEYOND: 1000}
_TOLD: dict[Deed, dict[str, Any]] = {
    Deed.TELL_A_HUGE_NUMBER: {"huge": 2**64},
    Deed.TELL_AN_OBJECT: {"thing": object()},
    Deed.SUCCEED: {"is_success": True},
}


def _do(deed: Deed) -> None:
    match deed:
        case Deed.RAISE:
            raise RuntimeError("the robot fell over")
        case Deed.HANG:
            time.sleep(HANG_S)
        case Deed.EXIT:
            os._exit(3)
