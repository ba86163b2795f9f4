"""publish_weights(): send an Algorithm's weights to a served policy while it trains."""

import copy
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core import (
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
    COMPONENT_RL_MODULE,
)
from ray.rllib.utils import force_list
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

from rlmesh_ray.compat.rllib import state_server_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.weights.weight_sink import weight_sink

logger = logging.getLogger(__name__)

RESULT_KEY = "served_policy"
"""Key of the delivery counters in a result of ``Algorithm.train``."""

_FINAL_TIMEOUT_S = 120.0
_CONNECTORS = (COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR)

AlgorithmOrConfigT = TypeVar("AlgorithmOrConfigT", AlgorithmConfig, Algorithm)
State = dict[str, Any]
"""The state with which an Algorithm acts: weights, connector states and counters.

The form is that of an EnvRunner's state in RLlib: ``rl_module``, ``env_to_module_connector``,
``module_to_env_connector``, ``num_env_steps_sampled_lifetime``. Values may be ObjectRefs.
"""


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
        self._sender = LatestOnlySender()
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
            self._sender.send(functools.partial(self._deliver, iteration, snapshot(algorithm)))
            self._sent_iteration = iteration
        result[RESULT_KEY] = {
            "policy_version": self._version,
            **self._sender.statistics(),
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
            # The weights of IMPALA and APPO change between iterations, too.
            if is_due or (iteration and isinstance(algorithm, IMPALA)):
                state = final_state(algorithm)
                self._sender.send(functools.partial(self._deliver, iteration, lambda: state))
        except Exception:
            logger.warning("the last weights could not be sent", exc_info=True)
        if not self._sender.wait(_FINAL_TIMEOUT_S):
            logger.warning("the last weights were not delivered within %g s", _FINAL_TIMEOUT_S)

    def _deliver(self, iteration: int, get_state: Callable[[], State | None]) -> bool:
        state = get_state()
        if state is None:
            return False
        version = max(iteration, self._target.policy_version + 1)
        self._version = self._target.set_weights(state, version=version)
        return True


class LatestOnlySender:
    """Makes one delivery at a time, in a thread for which the interpreter waits at exit.

    One thread calls it.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "rlmesh-ray-sender")
        self._latest: Future[None] | None = None
        self._delivered = self._superseded = self._failed = 0
        self.last_failed = False

    def send(self, deliver: Callable[[], bool]) -> None:
        """Have ``deliver`` called in the thread, instead of one that still waits for its turn.

        Args:
            deliver: Returns False if there is nothing to deliver. An error that it raises is logged
                and counted.
        """
        if self._latest is not None and self._latest.cancel():
            self._superseded += 1
        self._latest = self._executor.submit(self._run, deliver)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all is delivered; return False after the timeout."""
        return self._latest is None or not wait([self._latest], timeout_s).not_done

    def statistics(self) -> dict[str, int]:
        """Return how many were delivered, replaced by a newer one before, and failed.

        Empty ones are not counted as delivered.
        """
        return {
            "delivered": self._delivered,
            "superseded": self._superseded,
            "failed": self._failed,
        }

    def _run(self, deliver: Callable[[], bool]) -> None:
        try:
            self._delivered += deliver()
            self.last_failed = False
        except Exception as error:  # noqa: BLE001  # the caller of send does not wait for it
            name = type(error).__name__
            logger.warning(
                "the newest weights have not reached the served policy: %s: %s", name, error
            )
            self._failed += 1
            self.last_failed = True


def snapshot(algorithm: Algorithm) -> Callable[[], State | None]:
    """Take a snapshot of the state after a training iteration, without waiting for other actors.

    To be called in the training's thread.

    Returns:
        A function for any thread that returns the state, or None where there is none yet. It may
        wait for other actors.
    """
    server = state_server_of(algorithm)
    if server is not None:
        # IMPALA's and APPO's learners go on learning in threads during a read. The states that they
        # put into the server are consistent, and it alone has the merged states of connectors.
        return lambda: _pulled(server)
    state = _runner_state(algorithm)
    if algorithm.learner_group.is_local:
        state[COMPONENT_RL_MODULE] = _weights(algorithm)
        return lambda: state
    learner = algorithm.learner_group._workers[0]
    return lambda: state | {COMPONENT_RL_MODULE: learner.apply.remote(_module_state)}


def final_state(algorithm: Algorithm) -> State:
    # Else IMPALA's and APPO's threads would go on with the batches in their queues.
    algorithm.learner_group.foreach_learner(lambda learner: learner.shutdown())
    state = _runner_state(algorithm)
    server = state_server_of(algorithm)
    pulled = None if server is None else _pulled(server)
    if pulled is not None:
        state |= {name: pulled[name] for name in _CONNECTORS if name in pulled}
    state[COMPONENT_RL_MODULE] = _weights(algorithm)
    return state


def _pulled(server: Any) -> State | None:
    state: State | None = ray.get(server.pull.remote())
    return state


def _runner_state(algorithm: Algorithm) -> State:
    runner = algorithm.env_runner
    if runner is not None:
        # A copy: the next iteration may change these objects.
        state = copy.deepcopy(runner.get_state(components=list(_CONNECTORS)))
    else:
        state = {
            COMPONENT_ENV_TO_MODULE_CONNECTOR: algorithm.env_to_module_connector.get_state(),
            COMPONENT_MODULE_TO_ENV_CONNECTOR: algorithm.module_to_env_connector.get_state(),
        }
    sampled = algorithm.metrics.peek(
        (ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME), default=0
    )
    return {**state, NUM_ENV_STEPS_SAMPLED_LIFETIME: int(sampled)}


def _weights(algorithm: Algorithm) -> Any:
    components = f"{COMPONENT_LEARNER}/{COMPONENT_RL_MODULE}"
    # RLlib copies the weights here.
    state = algorithm.learner_group.get_state(components=components, inference_only=True)
    return state[COMPONENT_LEARNER][COMPONENT_RL_MODULE]


def _module_state(learner: Any) -> Any:
    state = learner.get_state(components=COMPONENT_RL_MODULE, inference_only=True)
    return state[COMPONENT_RL_MODULE]
