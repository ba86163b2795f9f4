"""publish_weights(): send an Algorithm's weights to a served policy while it trains."""

import functools
import logging
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.utils import force_list

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.weights.latest_only_sender import LatestOnlySender
from rlmesh_ray.rllib.weights.training_snapshot import (
    State,
    final_state,
    learns_in_threads,
    snapshot,
)
from rlmesh_ray.rllib.weights.weight_sink import weight_sink

logger = logging.getLogger(__name__)

RESULT_KEY = "served_policy"
"""Key of the delivery counters in a result of ``Algorithm.train``."""

_FINAL_TIMEOUT_S = 120.0

AlgorithmOrConfigT = TypeVar("AlgorithmOrConfigT", AlgorithmConfig, Algorithm)
_Snapshot = tuple[int, Callable[[], State | None]]
"""A training iteration, and a function that returns its state."""


def publish_weights(
    algorithm_or_config: AlgorithmOrConfigT, target: object, *, every_n_iterations: int = 1
) -> AlgorithmOrConfigT:
    """Update a served policy with the latest weights of a training after each iteration.

    Weights, connector states (observation filters) and counters are sent in a separate thread:
    training does not wait. If several iterations end during a delivery, only the weights of the
    latest are sent after it. When the Algorithm is stopped, it sends its last weights and waits for
    their delivery. The policy's version is the training iteration; where the target has that
    version already (a training that was restored), it is the target's plus one. A failure is
    logged, counted in the result (``result["served_policy"]``) and repaired by the next iteration;
    it does not end the training.

    Args:
        algorithm_or_config: A config of the new API stack, before the Algorithm is built from it
            (for Tune, or to be restored), or an Algorithm.
        target: A ``ModelFleet`` or its name, a ``ModelServiceActor``, or a ``ModelServer`` of the
            process that trains. It serves a checkpoint of the same modules and connectors.
        every_n_iterations: Number of iterations between two deliveries.

    Returns:
        ``algorithm_or_config``.

    Raises:
        ConfigurationError: ``target`` has another type, ``every_n_iterations`` is less than 1, or
            ``algorithm_or_config`` uses RLlib's old API stack.
    """
    make = functools.partial(
        WeightPublisher, weight_sink(target), every_n_iterations=every_n_iterations
    )
    config = (
        algorithm_or_config
        if isinstance(algorithm_or_config, AlgorithmConfig)
        else algorithm_or_config.config
    )
    if not config.enable_env_runner_and_connector_v2:
        raise ConfigurationError(
            "this is RLlib's old API stack, whose policies cannot be served; leave api_stack() at "
            "its defaults"
        )
    callback = make()
    if isinstance(algorithm_or_config, AlgorithmConfig):
        algorithm_or_config.callbacks([*force_list(algorithm_or_config.callbacks_class), make])
    else:
        algorithm_or_config.callbacks = [*force_list(algorithm_or_config.callbacks), callback]
        callback.on_algorithm_init(algorithm=algorithm_or_config)
    return algorithm_or_config


class WeightPublisher(RLlibCallback):
    """The RLlib callback behind ``publish_weights``.

    RLlib makes one for the Algorithm and one for each EnvRunner; the latter do nothing.

    Args:
        target: See ``publish_weights``.
        every_n_iterations: Number of iterations between two deliveries.
    """

    def __init__(self, target: object, *, every_n_iterations: int = 1) -> None:
        if every_n_iterations < 1:
            raise ConfigurationError(f"every_n_iterations={every_n_iterations} must be at least 1")
        self._target = weight_sink(target)
        self._every_n_iterations = every_n_iterations
        self._sender: LatestOnlySender[_Snapshot] = LatestOnlySender(
            "the newest weights have not reached the served policy", self._deliver
        )
        self._sent_iteration = 0
        self._version = 0

    def on_algorithm_init(self, *, algorithm: Algorithm, **kwargs: Any) -> None:
        """Have the last weights sent when the Algorithm is stopped.

        RLlib has no callback for that, but both ``stop`` and Tune end in ``cleanup``.
        """
        self._sent_iteration = algorithm.training_iteration
        clean_up = algorithm.cleanup

        def finish_and_clean_up() -> None:
            try:
                self._finish(algorithm)
            finally:
                clean_up()

        algorithm.cleanup = finish_and_clean_up

    def on_train_result(
        self, *, algorithm: Algorithm, result: dict[str, Any], **kwargs: Any
    ) -> None:
        """Send the weights of an iteration, and add the delivery counters to its result."""
        iteration = algorithm.training_iteration
        if iteration % self._every_n_iterations == 0:
            self._sender.send((iteration, snapshot(algorithm)))
            self._sent_iteration = iteration
        result[RESULT_KEY] = {
            "policy_version": self._version,
            **asdict(self._sender.statistics()),
        }

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all weights were delivered or have failed; return False after the timeout."""
        return self._sender.wait(timeout_s)

    def _finish(self, algorithm: Algorithm) -> None:
        """Send the last weights and wait for their delivery; never raises."""
        try:
            self._sender.wait(_FINAL_TIMEOUT_S)
            iteration = algorithm.training_iteration
            is_due = iteration > self._sent_iteration or self._sender.last_failed
            if is_due or (iteration and learns_in_threads(algorithm)):
                state = final_state(algorithm)
                self._sender.send((iteration, lambda: state))
        except Exception:
            logger.warning("the last weights could not be sent", exc_info=True)
        if not self._sender.wait(_FINAL_TIMEOUT_S):
            logger.warning("the last weights were not delivered within %g s", _FINAL_TIMEOUT_S)

    def _deliver(self, item: _Snapshot) -> bool:
        iteration, get_state = item
        state = get_state()
        if state is None:
            return False
        version = max(iteration, self._target.policy_version + 1)
        self._version = self._target.set_weights(state, version=version)
        return True
