"""RLMeshEnvRunner: RLlib's EnvRunner, with its lanes behind endpoints."""

import logging
import time
from typing import Any

from ray.rllib.callbacks.utils import make_callback
from ray.rllib.env.env_context import EnvContext
from ray.rllib.env.env_runner import ENV_STEP_FAILURE, NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RESET_TIMER, ENV_STEP_TIMER

from rlmesh_ray.client.env_client import EnvClient
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    ContractMismatchError,
    EndpointError,
    RlmeshError,
)
from rlmesh_ray.rllib.lane_group import LaneGroup
from rlmesh_ray.rllib.lane_session import LaneSession
from rlmesh_ray.rllib.plan import PLAN_KEY, RolloutPlan, require_same_contract

_LOG = logging.getLogger(__name__)

# A Ray actor that dies answers again after 2 s; a node's loss takes up to half a minute.
_CONNECT_ATTEMPTS = 8
_FIRST_DELAY_S = 0.25
_LONGEST_DELAY_S = 8.0
_MAX_FAILURES = 10  # in one call of sample()


class RLMeshEnvRunner(SingleAgentEnvRunner):
    """Samples from endpoints instead of environments in this process.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig. The episodes, connectors,
    callbacks and metrics are RLlib's own.

    When a session breaks, the running episodes of this runner are dropped and new sessions
    are opened, at the endpoint's new address if it has restarted; what other calls of
    ``sample`` have returned is not touched. The error leaves ``sample`` only after ten
    failures in one call, since RLlib ends the actor for it.
    """

    env: Any
    _num_failures = 0

    @override(SingleAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Sample as RLlib's own runner does; see ``SingleAgentEnvRunner.sample``."""
        self._num_failures = 0
        return list(super().sample(**kwargs))

    @override(SingleAgentEnvRunner)
    def make_env(self) -> None:
        """Open this runner's sessions.

        Raises:
            ConfigurationError: The config was not made by ``configure``.
            ContractMismatchError: An endpoint is not what it was on the driver.
            EndpointError: An endpoint stays away, in spite of repeated attempts.
        """
        plan = self.config.env_config.get(PLAN_KEY)
        if not isinstance(plan, RolloutPlan):
            raise ConfigurationError(
                "this config names no endpoints: pass it through rlmesh_ray.rllib.configure"
            )
        # Before anything can fail: the episodes that were running are gone in any case.
        self._needs_initial_reset = True
        if self.env is not None:
            self.env.close()
        self.env = LaneGroup(_open_sessions(plan, self.worker_index or 0), plan.contract)
        self.num_envs = self.env.num_envs
        if self.num_envs != self.config.num_envs_per_env_runner:
            self.env.close()
            raise ContractMismatchError(
                f"num_envs_per_env_runner={self.config.num_envs_per_env_runner}, but the endpoints "
                f"give {self.num_envs} lanes; leave it to rlmesh_ray.rllib.configure"
            )
        self._announce_environment()

    @override(SingleAgentEnvRunner)
    def _try_env_reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Reset all lanes, on new sessions if the old ones fail."""
        while True:
            try:
                with self.metrics.log_time(ENV_RESET_TIMER):
                    observation, infos = self.env.reset(seed=seed, options=options)
                return observation, infos
            except RlmeshError as error:
                self._start_over(error)

    @override(SingleAgentEnvRunner)
    def _try_env_step(self, actions: Any) -> Any:
        """Step all lanes; open new sessions and tell RLlib to start over if that fails."""
        try:
            with self.metrics.log_time(ENV_STEP_TIMER):
                results = self.env.step(actions)
        except RlmeshError as error:
            self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
            self._start_over(error)
            return ENV_STEP_FAILURE
        self._log_env_steps(metric=self._metrics_num_try_env_step, num_steps=1)
        return results

    def _start_over(self, error: RlmeshError) -> None:
        self._num_failures += 1
        if self._num_failures > _MAX_FAILURES:
            raise error
        _LOG.warning(
            "worker %s: %s; its running episodes are dropped, new sessions are opened (%d/%d)",
            self.worker_index,
            error,
            self._num_failures,
            _MAX_FAILURES,
        )
        self.make_env()

    def _announce_environment(self) -> None:
        make_callback(
            "on_environment_created",
            callbacks_objects=self._callbacks,
            callbacks_functions=self.config.callbacks_on_environment_created,
            kwargs={
                "env_runner": self,
                "metrics_logger": self.metrics,
                "env": self.env.unwrapped,
                "env_context": EnvContext(
                    self.config.env_config,
                    worker_index=self.worker_index,
                    num_workers=self.num_workers,
                    remote=False,
                ),
            },
        )


def _open_sessions(plan: RolloutPlan, worker_index: int) -> list[LaneSession]:
    sessions: list[LaneSession] = []
    try:
        for endpoint in plan.endpoints_of(worker_index):
            client = _connect(plan, endpoint)
            sessions.append(LaneSession(client))
            require_same_contract(plan.contract, client.contract, client.address)
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions


def _connect(plan: RolloutPlan, endpoint: int) -> EnvClient:
    """Open a session; an endpoint that is just restarting is waited for."""
    delay_s = _FIRST_DELAY_S
    for _ in range(_CONNECT_ATTEMPTS - 1):
        try:
            return EnvClient(plan.dial(endpoint), step_timeout_s=plan.step_timeout_s)
        except AccessDeniedError:
            raise  # another try would be answered the same
        except EndpointError as error:
            _LOG.info("endpoint %d: %s; trying again in %.2g s", endpoint, error, delay_s)
        time.sleep(delay_s)
        delay_s = min(2 * delay_s, _LONGEST_DELAY_S)
    return EnvClient(plan.dial(endpoint), step_timeout_s=plan.step_timeout_s)
