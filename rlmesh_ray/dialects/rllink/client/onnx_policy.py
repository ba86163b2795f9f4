"""A policy that came over RLlink: an ONNX model, and how RLlib draws actions from its output."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.dialects.rllink.wire import messages as m
from rlmesh_ray.errors import ConfigurationError, MissingPackageError

Array = NDArray[Any]

# RLlib's own bounds of a squashed Gaussian's deviations.
_LEAST_LOG_DEVIATION, _MOST_LOG_DEVIATION = -5.0, 2.0


def action_dtype(config: m.SetConfig) -> np.dtype[Any]:
    """Return the dtype of the actions.

    Raises:
        ConfigurationError: The server does not say what actions are, as Ray's own does not.
    """
    try:
        dtype: np.dtype[Any] = np.dtype(config.extras["action_space"]["dtype"])
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
        if kind not in _DRAWS:
            raise ConfigurationError(
                f"the server draws actions from {kind!r}; this client knows {', '.join(_DRAWS)}"
            )
        self._kind = kind
        self._space: dict[str, Any] = self._told["action_space"]
        self._obs_dtype = np.dtype(self._told["observation_space"]["dtype"])
        self._random = np.random.default_rng(seed)
        self._session: Any = None
        self._epsilon = 0.0
        self.weights_seq_no = -1
        """Of the weights that act; -1 before the first."""

    def load(self, state: m.SetState) -> None:
        """Act with other weights from now on.

        Raises:
            MissingPackageError: onnxruntime is missing.
        """
        try:
            import onnxruntime
        except ImportError as error:
            raise MissingPackageError(
                "acting with a model needs: pip install onnxruntime; or ask for each action"
            ) from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # small models: more would wait for each other
        options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(
            state.onnx, options, providers=["CPUExecutionProvider"]
        )
        self._epsilon = float(state.extras.get("epsilon", 0.0))
        self.weights_seq_no = state.weights_seq_no

    def distribution_inputs(self, obs: Array) -> Array:
        """Return what actions are drawn from, (n, k), for observations, (n, *shape)."""
        name = self._session.get_inputs()[0].name
        outputs: Array = self._session.run(None, {name: np.asarray(obs, self._obs_dtype)})[0]
        return outputs

    def act(self, obs: Array) -> Array:
        """Return actions as they were drawn, (n, *shape): these go into episodes.

        Args:
            obs: (n, *shape).
        """
        inputs = self.distribution_inputs(obs).astype(np.float64)
        actions = _DRAWS[self._kind](self, inputs)
        return actions.astype(self._space["dtype"])

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

    def _categorical(self, logits: Array) -> Array:
        if not self._told["explore"]:
            return np.asarray(np.argmax(logits, axis=-1))
        # The largest of logits with Gumbel noise falls as a draw from their distribution.
        noisy = logits + self._random.gumbel(size=logits.shape)
        return np.asarray(np.argmax(noisy, axis=-1))

    def _epsilon_greedy(self, values: Array) -> Array:
        best: Array = np.argmax(values, axis=-1)
        if not self._told["explore"]:
            return best
        others = self._random.integers(values.shape[-1], size=best.shape)
        return np.where(self._random.random(best.shape) < self._epsilon, others, best)

    def _diag_gaussian(self, inputs: Array) -> Array:
        mean, log_deviation = np.split(inputs, 2, axis=-1)
        return self._shaped(self._normal(mean, np.exp(log_deviation)))

    def _squashed_gaussian(self, inputs: Array) -> Array:
        mean, log_deviation = np.split(inputs, 2, axis=-1)
        if not self._told["explore"]:
            return self._shaped(mean)  # as RLlib does: the mean itself, without the tanh
        log_deviation = np.clip(log_deviation, _LEAST_LOG_DEVIATION, _MOST_LOG_DEVIATION)
        return self._shaped(np.tanh(self._normal(mean, np.exp(log_deviation))))

    def _normal(self, mean: Array, deviation: Array) -> Array:
        if not self._told["explore"]:
            return mean
        return mean + deviation * self._random.standard_normal(mean.shape)

    def _shaped(self, actions: Array) -> Array:
        return actions.reshape(len(actions), *self._space["shape"])


_DRAWS = {
    "categorical": OnnxPolicy._categorical,
    "epsilon_greedy": OnnxPolicy._epsilon_greedy,
    "diag_gaussian": OnnxPolicy._diag_gaussian,
    "squashed_gaussian": OnnxPolicy._squashed_gaussian,
}
