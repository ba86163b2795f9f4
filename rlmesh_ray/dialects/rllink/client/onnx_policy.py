"""A policy that came over RLlink: an ONNX model, and how RLlib draws actions from its output."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.action_draws import KINDS, ActionDraws
from rlmesh_ray.models.onnx.onnx_session import OnnxSession, check_model
from rlmesh_ray.spaces.spec import DTYPES

Array = NDArray[Any]
_DTYPES = {name: np.dtype(name) for name in DTYPES}


def action_dtype(config: m.SetConfig) -> np.dtype[Any]:
    """Return the dtype of the actions.

    Raises:
        ConfigurationError: The server does not say what actions are, as Ray's own does not.
    """
    try:
        # np.dtype() accepts others, such as one of a gigabyte per element.
        dtype: np.dtype[Any] = _DTYPES[config.extras["action_space"]["dtype"]]
    except (KeyError, TypeError) as error:
        raise ConfigurationError(
            "the server does not say what actions are; agents need a runner of rlmesh_ray"
        ) from error
    return dtype


class OnnxPolicy:
    """Acts as RLlib's module would: the same distribution, another generator.

    Args:
        config: What the server says of sampling.
        seed: For the draws.

    Raises:
        ConfigurationError: onnxruntime is missing, or the server does not say how to draw.
    """

    def __init__(self, config: m.SetConfig, seed: int | None = None) -> None:
        self._told = config.extras
        kind = self._told.get("action_distribution")
        if kind not in KINDS:
            raise ConfigurationError(
                f"the server draws actions from {kind!r}; this client knows {', '.join(KINDS)}"
            )
        self._draws = ActionDraws(kind, seed)
        self._space: dict[str, Any] = self._told["action_space"]
        self._obs_dtype = np.dtype(self._told["observation_space"]["dtype"])
        self._session: OnnxSession | None = None
        self.weights_seq_no = -1
        """Of the weights that act; -1 before the first."""

    def load(self, state: m.SetState) -> None:
        """Act with other weights from now on.

        Raises:
            ConfigurationError: The server's model would read this machine's files.
            MissingPackageError: onnx or onnxruntime is missing.
            PolicyError: It is no model.
        """
        check_model(state.onnx, "the server's model")
        self._session = OnnxSession(state.onnx)
        self._draws.epsilon = float(state.extras.get("epsilon", 0.0))
        self.weights_seq_no = state.weights_seq_no

    def distribution_inputs(self, obs: Array) -> Array:
        """Return what actions are drawn from, (n, k), for observations, (n, *shape)."""
        assert self._session is not None, "a policy acts once it has weights"
        outputs: Array = self._session.run(np.asarray(obs, self._obs_dtype))[0]
        return outputs

    def act(self, obs: Array) -> Array:
        """Return actions as they were drawn, (n, *shape): these go into episodes.

        Args:
            obs: (n, *shape).
        """
        inputs = self.distribution_inputs(obs).astype(np.float64)
        actions, _ = self._draws.draw(inputs, explore=self._told["explore"])
        shape = self._space["shape"] if self._space["kind"] == "box" else actions.shape[1:]
        return actions.reshape(len(actions), *shape).astype(self._space["dtype"])

    def for_environment(self, action: Array) -> Array:
        """Return an action as the environment takes it: scaled or clipped, as RLlib would."""
        if self._space["kind"] == "discrete":
            return action
        low, high = self._bound("low", -math.inf), self._bound("high", math.inf)
        if self._told["normalize_actions"]:
            if not (np.isfinite(low).all() and np.isfinite(high).all()):
                return action
            action = low + (action + 1.0) * (high - low) / 2.0
        elif not self._told["clip_actions"]:
            return action
        return np.clip(action, low, high).astype(self._space["dtype"])

    def _bound(self, name: str, none: float) -> Array:
        told = self._space[name]
        values = np.array([none if each is None else each for each in np.ravel(told)], float)
        return (
            np.broadcast_to(values, self._space["shape"])
            if values.size == 1
            else values.reshape(self._space["shape"])
        )
