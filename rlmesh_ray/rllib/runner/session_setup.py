"""Opening a runner's sessions, and announcing its environment to callbacks."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext

from rlmesh_ray.client.env_session_client import open_env_session
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, RlmeshError
from rlmesh_ray.rllib.config.rollout_plan import PLAN_KEY, RolloutPlan, require_next_step
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments, runner_id, session_names
from rlmesh_ray.rllib.runner.autoreset_emulation import NextStepSession
from rlmesh_ray.rllib.runner.session_retry import RetryPolicy
from rlmesh_ray.spaces.contract import require_same_contract

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_OPEN_TIMEOUT_S = 30.0
"""How long to wait for endpoints that are away when a runner is made."""


def plan_of(config: Any) -> RolloutPlan:
    """Return the plan that ``configure`` has put into an AlgorithmConfig.

    Raises:
        ConfigurationError: There is none.
    """
    plan = config.env_config.get(PLAN_KEY)
    if not isinstance(plan, RolloutPlan):
        raise ConfigurationError(
            "this config names no endpoints: pass it through rlmesh_ray.rllib.configure"
        )
    return plan


def require_width(config: Any, num_envs: int) -> None:
    """Check that ``num_envs_per_env_runner`` is still what ``configure`` has set.

    Raises:
        ContractMismatchError: ``num_envs_per_env_runner`` is not ``num_envs``.
    """
    if num_envs != config.num_envs_per_env_runner:
        raise ContractMismatchError(
            f"num_envs_per_env_runner={config.num_envs_per_env_runner}, but the endpoints "
            f"give {num_envs} lanes; do not change it after rlmesh_ray.rllib.configure"
        )


def assignments_for(runner: Any, plan: RolloutPlan) -> SessionAssignments:
    """Return the assignments of an EnvRunner's sessions; none has been requested yet."""
    worker_index = runner.worker_index or 0
    in_evaluation = bool(runner.config.in_evaluation)
    endpoints = plan.endpoints_of(worker_index, in_evaluation=in_evaluation)
    names = session_names(
        plan.plan_id,
        worker_index,
        len(endpoints),
        in_evaluation=in_evaluation,
        runner=runner_id(),
    )
    node_id = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
    return SessionAssignments(plan, endpoints, names, node_id)


def open_sessions(
    plan: RolloutPlan, assignments: SessionAssignments, numbers: Sequence[int]
) -> list[NextStepSession]:
    """Open the sessions with these numbers, at the endpoints that they are assigned to.

    If one cannot be opened, the assignments of all of them are dropped.

    Raises:
        ContractMismatchError: An endpoint is not what it was on the driver.
        EndpointError: An endpoint cannot be reached, or refuses.
    """
    sessions: list[NextStepSession] = []
    try:
        for number in numbers:
            connect_options = plan.connect_options(
                assignments.endpoints[number], assignments.get(number)
            )
            client = open_env_session(
                connect_options,
                step_timeout_s=plan.step_timeout_s,
                reset_timeout_s=plan.reset_timeout_s,
            )
            sessions.append(NextStepSession(client))
            require_same_contract(plan.contract, client.contract, client.address)
            require_next_step(client.contract, client.answer.capabilities, client.address)
    except BaseException:
        for session in sessions:
            session.close()
        assignments.drop(numbers)
        raise
    return sessions


def open_with_retries(open_: Callable[[], T]) -> T:
    """Return the result of ``open_``; it is called again while endpoints are restarting.

    Raises:
        RlmeshError: It could not be opened.
    """
    retry = RetryPolicy(_OPEN_TIMEOUT_S)
    while True:
        try:
            return open_()
        except RlmeshError as error:
            delay_s = retry.failed(error, time.monotonic())
            if delay_s is None:
                raise
            _LOG.info("%s; trying again in %.2g s", error, delay_s)
        time.sleep(delay_s)


def announce_environment(runner: Any) -> None:
    """Call the ``on_environment_created`` callbacks of an EnvRunner, as RLlib does."""
    make_callback(
        "on_environment_created",
        callbacks_objects=runner._callbacks,
        callbacks_functions=runner.config.callbacks_on_environment_created,
        kwargs={
            "env_runner": runner,
            "metrics_logger": runner.metrics,
            "env": runner.env.unwrapped,
            "env_context": EnvContext(
                runner.config.env_config,
                worker_index=runner.worker_index,
                num_workers=runner.num_workers,
                remote=False,
            ),
        },
    )
