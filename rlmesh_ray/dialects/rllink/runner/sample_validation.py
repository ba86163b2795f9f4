"""Validation of what simulators send, by the spaces: nothing else reaches the learner."""

import math
from typing import Any

import gymnasium
import numpy as np

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.errors import ConfigurationError, ConformanceError


class SampleSpaces:
    """Checks and casts samples.

    Args:
        observation: A Box.
        action: A Box, or a Discrete that starts at 0.

    Raises:
        ConfigurationError: They are others.
    """

    num_choices: int
    """Of a Discrete; 0 for a Box."""
    input_width: int
    """How many numbers an action is drawn from."""

    def __init__(
        self, observation: gymnasium.Space[Any] | None, action: gymnasium.Space[Any] | None
    ) -> None:
        if not isinstance(observation, gymnasium.spaces.Box):
            raise ConfigurationError(
                f"observations of {observation} cannot come over RLlink: give a Box as "
                "observation_space, and have simulators flatten what they see"
            )
        if isinstance(action, gymnasium.spaces.Discrete) and action.start == 0:
            self.num_choices, self.input_width = int(action.n), int(action.n)
        elif isinstance(action, gymnasium.spaces.Box):
            self.num_choices, self.input_width = 0, 2 * math.prod(action.shape)
        else:
            raise ConfigurationError(
                f"actions of {action} cannot come over RLlink: give a Box, or a Discrete that "
                "starts at 0, as action_space"
            )
        self.observation = observation
        self.action: gymnasium.Space[Any] = action
        # RLlib's modules and learners do not support a Box of shape ().
        self._action_shape = () if self.num_choices else action.shape or (1,)

    def conformed(self, chunk: m.Chunk) -> m.Chunk:
        """Return a chunk with the dtypes of the spaces.

        Raises:
            ConformanceError: It does not fit them.
        """
        num_steps = len(chunk)
        return m.Chunk(
            self.conformed_obs(chunk.obs, num_steps + 1),
            self._conformed_actions(chunk.actions, num_steps),
            _learnable("rewards", chunk.rewards),
            chunk.is_terminated,
            chunk.is_truncated,
            chunk.episode_id,
            self._conformed_outputs(chunk, num_steps),
        )

    def conformed_obs(self, obs: m.Array, num: int) -> m.Array:
        """Return observations, (num, *shape), with the dtype of their space.

        Raises:
            ConformanceError: They do not fit it.
        """
        _require_shape("obs", obs, (num, *self.observation.shape))
        return _cast("obs", obs, np.dtype(self.observation.dtype))

    def conformed_reward(self, reward: float) -> float:
        """Return a reward.

        Raises:
            ConformanceError: A learner cannot hold it.
        """
        return float(_learnable("reward", np.array(reward, np.float64)))

    def _conformed_actions(self, actions: m.Array, num: int) -> m.Array:
        if actions.shape == (num, *(self.action.shape or ())):
            actions = actions.reshape(num, *self._action_shape)
        _require_shape("actions", actions, (num, *self._action_shape))
        cast = _cast("actions", actions, np.dtype(self.action.dtype))
        if self.num_choices and not ((cast >= 0) & (cast < self.num_choices)).all():
            reason = f"there is one that is not from 0 to {self.num_choices - 1}"
            raise ConformanceError("range", "actions", reason)
        return cast

    def _conformed_outputs(self, chunk: m.Chunk, num: int) -> dict[str, m.Array]:
        if len(chunk.model_outputs) < len(m.MODEL_OUTPUTS):
            return {}
        shapes = {m.ACTION_DIST_INPUTS: (num, self.input_width), m.ACTION_LOGP: (num,)}
        for name, values in chunk.model_outputs.items():
            _require_shape(name, values, shapes[name])
        return {
            name: _cast(name, values, np.dtype(np.float32))
            for name, values in chunk.model_outputs.items()
        }


def _require_shape(name: str, values: m.Array, shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ConformanceError(
            "structure", name, f"the shape is {values.shape}, where {shape} is expected"
        )


def _learnable(name: str, values: m.Array) -> m.Array:
    """Return values, as they are, if learners can hold them.

    Raises:
        ConformanceError: There is one beyond all float32: it would be infinite there.
    """
    _cast(name, values, np.dtype(np.float32))
    return values


def _cast(name: str, values: m.Array, dtype: np.dtype[Any]) -> m.Array:
    """Return values with another dtype, if they are finite and stay what they are.

    Raises:
        ConformanceError: They are not, or do not.
    """
    if not np.isfinite(values).all():
        raise ConformanceError("range", name, "there is a value that is not a finite number")
    # What does not fit is found by what comes of it.
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    is_kept = np.isfinite(cast).all() if dtype.kind == "f" else np.array_equal(cast, values)
    if not is_kept:
        raise ConformanceError("range", name, f"there is a value that is no {dtype.name}")
    return cast
