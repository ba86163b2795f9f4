"""Drawing of actions in NumPy, by RLlib's distributions, from a generator of its own.

The distributions are RLlib's, the numbers drawn are not: RLlib draws from torch's generator.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

# RLlib's own bounds of a squashed Gaussian's deviations, and its distance from its ends.
_LEAST_LOG_DEVIATION, _MOST_LOG_DEVIATION = -5.0, 2.0
_SMALL = 1e-6
_LEAST_TIME = np.finfo(np.float32).tiny
_LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))


class ActionDraws:
    """Draws actions from a module's output.

    Args:
        kind: One of ``KINDS``. ``categorical``: the output is logits. ``diag_gaussian``: means,
            then logarithms of standard deviations. ``squashed_gaussian``: the same, and a tanh
            over what is drawn. ``epsilon_greedy``: values, the highest of which wins unless chance
            decides otherwise.
        seed: Of the generator; None: a random one.

    Raises:
        KeyError: There is no such kind.
    """

    def __init__(self, kind: str, seed: int | None = None) -> None:
        self._explore, self._exploit = KINDS[kind]
        self._random = np.random.default_rng(seed)
        self.epsilon = 0.0
        """How often ``epsilon_greedy`` leaves the choice to chance."""

    def draw(self, inputs: Array, *, explore: bool) -> tuple[Array, Array | None]:
        """Return actions, and their log probabilities if the kind has such.

        Args:
            inputs: The module's output, (n, k), of a float dtype.
            explore: Whether to draw; False: the likeliest actions, whose log probability is zero.

        Returns:
            Actions, (n,) or (n, k / 2), and log probabilities. They are NaN where an input is.
        """
        if inputs.dtype == np.float16:
            inputs = inputs.astype(np.float32)  # NumPy draws no halves
        return (self._explore if explore else self._exploit)(self, inputs)

    def _categorical(self, logits: Array) -> tuple[Array, Array | None]:
        weights = logits - logits.max(axis=-1, keepdims=True)
        logp = weights - np.log(np.exp(weights).sum(axis=-1, keepdims=True))
        # The first of several exponential clocks to ring is each with its probability. One time of
        # some eight million is zero, by which nothing can be divided.
        times = self._random.standard_exponential(logits.shape, dtype=logits.dtype)
        actions = (np.exp(logp) / np.maximum(times, _LEAST_TIME)).argmax(axis=-1)
        return actions, logp[np.arange(len(logp)), actions]

    def _likeliest(self, values: Array) -> tuple[Array, Array | None]:
        return values.argmax(axis=-1), np.zeros(len(values), int)

    def _greedy(self, values: Array) -> tuple[Array, Array | None]:
        return values.argmax(axis=-1), None

    def _epsilon_greedy(self, values: Array) -> tuple[Array, Array | None]:
        actions = values.argmax(axis=-1)
        # RLlib takes a value that is zero or minus infinity for that of a masked action.
        allowed = (values != 0) & (values != -np.inf)
        noise = self._random.random(values.shape)
        chance = np.where(allowed, noise, -1.0).argmax(axis=-1)
        is_chance = self._random.random(len(values)) < self.epsilon
        return np.where(is_chance, chance, actions), None

    def _diag_gaussian(self, inputs: Array) -> tuple[Array, Array | None]:
        mean, log_deviation = np.split(inputs, 2, axis=-1)
        noise = self._noise(mean)
        actions = mean + np.exp(log_deviation) * noise
        return actions, _logp_of(noise, log_deviation).sum(axis=-1)

    def _squashed_gaussian(self, inputs: Array) -> tuple[Array, Array | None]:
        mean, log_deviation = np.split(inputs, 2, axis=-1)
        log_deviation = np.clip(log_deviation, _LEAST_LOG_DEVIATION, _MOST_LOG_DEVIATION)
        deviation = np.exp(log_deviation)
        actions = np.tanh(mean + deviation * self._noise(mean))
        # As RLlib does: the probability of the action as it is, which may have been rounded to 1.
        drawn = np.arctanh(np.clip(actions, -1.0 + _SMALL, 1.0 - _SMALL))
        logp = _logp_of((drawn - mean) / deviation, log_deviation)
        slope = 2.0 * (math.log(2.0) - drawn - np.logaddexp(0.0, -2.0 * drawn))
        return actions, (logp - slope).sum(axis=-1)

    def _mean(self, inputs: Array) -> tuple[Array, Array | None]:
        mean, _ = np.split(inputs, 2, axis=-1)
        return mean, np.zeros_like(mean)

    def _noise(self, like: Array) -> Array:
        return np.asarray(self._random.standard_normal(like.shape, like.dtype))


def _logp_of(noise: Array, log_deviation: Array) -> Array:
    logp: Array = -(noise**2) / 2 - log_deviation - np.asarray(_LOG_SQRT_TAU, noise.dtype)
    return logp


Draw = Callable[[ActionDraws, Array], tuple[Array, Array | None]]

KINDS: dict[str, tuple[Draw, Draw]] = {
    "categorical": (ActionDraws._categorical, ActionDraws._likeliest),
    "diag_gaussian": (ActionDraws._diag_gaussian, ActionDraws._mean),
    "squashed_gaussian": (ActionDraws._squashed_gaussian, ActionDraws._mean),
    "epsilon_greedy": (ActionDraws._epsilon_greedy, ActionDraws._greedy),
}
"""Kinds of distributions: how actions are drawn, and how the likeliest are chosen."""
