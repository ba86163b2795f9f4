"""The state with which an Algorithm acts: weights, connector states and counters.

The form is that of an EnvRunner's state in RLlib: ``rl_module``, ``env_to_module_connector``,
``module_to_env_connector``, ``num_env_steps_sampled_lifetime``. Values may be ObjectRefs.
"""

import copy
from collections.abc import Callable
from typing import Any

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.impala import IMPALA
from ray.rllib.core import (
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_LEARNER,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
    COMPONENT_RL_MODULE,
)
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

from rlmesh_ray.compat.rllib import state_server_of

State = dict[str, Any]
_CONNECTORS = (COMPONENT_ENV_TO_MODULE_CONNECTOR, COMPONENT_MODULE_TO_ENV_CONNECTOR)


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
    """Return the last state of a training that will not be continued."""
    # Else IMPALA's and APPO's threads would go on with the batches in their queues.
    algorithm.learner_group.foreach_learner(lambda learner: learner.shutdown())
    state = _runner_state(algorithm)
    server = state_server_of(algorithm)
    pulled = None if server is None else _pulled(server)
    if pulled is not None:
        state |= {name: pulled[name] for name in _CONNECTORS if name in pulled}
    state[COMPONENT_RL_MODULE] = _weights(algorithm)
    return state


def learns_in_threads(algorithm: Algorithm) -> bool:
    """Return whether weights change between iterations, too."""
    return isinstance(algorithm, IMPALA)


def _pulled(server: Any) -> State | None:
    state: State | None = ray.get(server.pull.remote())
    return state


def _runner_state(algorithm: Algorithm) -> State:
    """Return the state of the local EnvRunner, or of the Algorithm instead, without the weights."""
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
