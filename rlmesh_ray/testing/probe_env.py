"""The probe of ``rlmesh_ray.compliance.probe``, as a gymnasium environment.

Importing this module registers ``RLMeshProbe-v0``:
``rlmesh-ray serve-env rlmesh_ray.testing.probe_env:RLMeshProbe-v0``.
"""

import math
import time
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.compliance.probe import (
    ACTION_SPACE,
    METADATA_KEY,
    OBSERVATION_SPACE,
    REST,
    SLEEP_S,
    ProbeCommand,
)
from rlmesh_ray.spaces.gym_conversion import to_gymnasium

ENV_ID = "RLMeshProbe-v0"
_FRAME_SHAPE = (4, 4, 3)


class ProbeEnv(gymnasium.Env[Any, Any]):
    """Executes the ``command`` of its action; see ``rlmesh_ray.compliance.probe``.

    Args:
        render_mode: ``"rgb_array"``: frames ``(4, 4, 3) uint8`` of the step count; None: none.
    """

    def __init__(self, render_mode: str | None = "rgb_array") -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 30, METADATA_KEY: 1}
        self.action_space = to_gymnasium(ACTION_SPACE)
        self.observation_space = to_gymnasium(OBSERVATION_SPACE)
        self.render_mode = render_mode
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; ``options["command"]`` is executed as in a step."""
        super().reset(seed=seed)
        self._steps = 0
        command = ProbeCommand((options or {}).get("command", ProbeCommand.GO_ON))
        return self._obey(command, REST), self._infos(command)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step and execute the command."""
        self._steps += 1
        command = ProbeCommand(int(action["command"]))
        echo = {key: value for key, value in action.items() if key != "command"}
        reward = float(action["box"][0])
        observation = self._obey(command, echo)
        return (
            observation,
            reward if math.isfinite(reward) else 0.0,
            command is ProbeCommand.TERMINATE,
            command is ProbeCommand.TRUNCATE,
            self._infos(command),
        )

    def render(self) -> NDArray[np.uint8] | None:  # type: ignore[override]  # None: no render mode
        """Return a frame filled with the step count."""
        if self.render_mode is None:
            return None
        return np.full(_FRAME_SHAPE, self._steps % 256, np.uint8)

    def _infos(self, command: ProbeCommand) -> dict[str, Any]:
        return {"steps": self._steps, "command": int(command)}

    def _obey(self, command: ProbeCommand, echo: dict[str, Any]) -> dict[str, Any]:
        if command is ProbeCommand.FAIL:
            raise RuntimeError("the probe got the command to fail")
        if command is ProbeCommand.SLEEP:
            time.sleep(SLEEP_S)
        observation = {
            "steps": np.array([self._steps], np.int32),
            "noise": self.np_random.random(2, np.float32),
            "echo": echo,
        }
        observation.update(_DEVIATIONS.get(command, {}))
        if command is ProbeCommand.OBSERVE_MISSING_KEY:
            del observation["noise"]
        if command is ProbeCommand.OBSERVE_INTEGRAL_FLOAT:
            observation["steps"] = np.array([self._steps], np.float64)
        return observation


_DEVIATIONS: dict[ProbeCommand, dict[str, NDArray[Any]]] = {
    ProbeCommand.OBSERVE_NAN: {"noise": np.array([np.nan, 2.0], np.float32)},
    ProbeCommand.OBSERVE_OUT_OF_RANGE: {"noise": np.array([2.0, 0.5], np.float32)},
    ProbeCommand.OBSERVE_WRONG_SHAPE: {"noise": np.zeros(3, np.float32)},
    ProbeCommand.OBSERVE_FRACTION: {"steps": np.array([0.5])},
    ProbeCommand.OBSERVE_TOO_LARGE: {"steps": np.array([2.0**40])},
    ProbeCommand.OBSERVE_DOUBLE: {"noise": np.array([0.25, 0.1], np.float64)},
}

# Gymnasium's env checker would reject the probe's wrong observations.
gymnasium.register(ENV_ID, f"{__name__}:ProbeEnv", disable_env_checker=True)
