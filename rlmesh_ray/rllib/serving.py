"""Serve what is being trained: an Algorithm's weights go to a served policy as it learns."""

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
from rlmesh_ray.rllib.courier import Courier
from rlmesh_ray.rllib.newest_state import State, final_state, learns_in_threads, snapshot
from rlmesh_ray.rllib.weights_target import weights_target

logger = logging.getLogger(__name__)

RESULT_KEY = "served_policy"
"""Where a result of ``Algorithm.train`` tells how serving goes."""

_FINAL_TIMEOUT_S = 120.0

LearnerT = TypeVar("LearnerT", AlgorithmConfig, Algorithm)
_Parcel = tuple[int, Callable[[], State | None]]
"""The iteration, and how to get its state."""


def serve_latest(learner: LearnerT, target: object, *, every_n_iterations: int = 1) -> LearnerT:
    """Let a served policy act with the newest weights of a training, from iteration to iteration.

    Weights, connector states (observation filters) and counters are sent after each iteration by a
    thread of their own: training does not wait. If the next iteration is done before they have
    arrived, only the newest are sent after them. When the Algorithm is stopped, its last weights
    are sent, and waited for. The policy's version is the training iteration; where the target has
    that version already (a training that was restored), one more than the target's. What fails is
    logged, counted in the result (``result["served_policy"]``) and tried again at the next
    iteration; it does not end the training.

    Args:
        learner: A config of the new API stack, before the Algorithm is built from it (for Tune,
            or to be restored), or an Algorithm.
        target: A ``ModelFleet`` or its name, a ``ModelServiceActor``, or a ``ModelServer`` of the
            process that trains. It serves a checkpoint of the same modules and connectors.
        every_n_iterations: How often.

    Returns:
        ``learner``.

    Raises:
        ConfigurationError: ``target`` is none of these, ``every_n_iterations`` is less than 1, or
            ``learner`` is of RLlib's old API stack.
    """
    make = functools.partial(
        ServeWeights, weights_target(target), every_n_iterations=every_n_iterations
    )
    config = learner if isinstance(learner, AlgorithmConfig) else learner.config
    if not config.enable_env_runner_and_connector_v2:
        raise ConfigurationError(
            "this is RLlib's old API stack, whose policies cannot be served; leave api_stack() at "
            "its defaults"
        )
    callback = make()
    if isinstance(learner, AlgorithmConfig):
        learner.callbacks([*force_list(learner.callbacks_class), make])
    else:
        learner.callbacks = [*force_list(learner.callbacks), callback]
        callback.on_algorithm_init(algorithm=learner)
    return learner


class ServeWeights(RLlibCallback):
    """The callback behind ``serve_latest``, which explains it.

    RLlib makes one for the Algorithm and one for each EnvRunner; the latter do nothing.

    Args:
        target: See ``serve_latest``.
        every_n_iterations: How often to send weights.
    """

    def __init__(self, target: object, *, every_n_iterations: int = 1) -> None:
        if every_n_iterations < 1:
            raise ConfigurationError(f"every_n_iterations={every_n_iterations} must be at least 1")
        self._target = weights_target(target)
        self._every_n_iterations = every_n_iterations
        self._courier: Courier[_Parcel] = Courier(
            "the newest weights have not reached the served policy", self._deliver
        )
        self._sent_iteration = 0
        self._version = 0

    def on_algorithm_init(self, *, algorithm: Algorithm, **kwargs: Any) -> None:
        """See to it that the last weights are sent when the Algorithm is stopped.

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
        """Send what the iteration has learnt, and tell in its result how serving goes."""
        iteration = algorithm.training_iteration
        if iteration % self._every_n_iterations == 0:
            self._courier.send((iteration, snapshot(algorithm)))
            self._sent_iteration = iteration
        result[RESULT_KEY] = {
            "policy_version": self._version,
            **asdict(self._courier.statistics()),
        }

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until what has been sent so far acts, or has failed; return whether that is so."""
        return self._courier.wait(timeout_s)

    def _finish(self, algorithm: Algorithm) -> None:
        """Send the last weights and wait for it; never raises."""
        try:
            self._courier.wait(_FINAL_TIMEOUT_S)
            iteration = algorithm.training_iteration
            has_news = iteration > self._sent_iteration or self._courier.last_failed
            if has_news or (iteration and learns_in_threads(algorithm)):
                state = final_state(algorithm)
                self._courier.send((iteration, lambda: state))
        except Exception:
            logger.warning("the last weights could not be sent", exc_info=True)
        if not self._courier.wait(_FINAL_TIMEOUT_S):
            logger.warning("the last weights are still on their way after %g s", _FINAL_TIMEOUT_S)

    def _deliver(self, parcel: _Parcel) -> bool:
        iteration, state_of = parcel
        state = state_of()
        if state is None:
            return False
        version = max(iteration, self._target.policy_version + 1)
        self._version = self._target.set_weights(state, version=version)
        return True
