"""RLMeshMultiAgentEnvRunner: RLlib's MultiAgentEnvRunner, with its lanes behind endpoints."""

import logging
from functools import partial
from typing import Any

from ray.rllib.env.env_runner import ENV_STEP_FAILURE, NUM_ENV_STEP_FAILURES_LIFETIME
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import ENV_RESET_TIMER, ENV_STEP_TIMER

from rlmesh_ray.errors import ConformanceError, RlmeshError
from rlmesh_ray.rllib.multi_agent_env import MultiAgentLaneGroup
from rlmesh_ray.rllib.opening import (
    announce_environment,
    open_sessions,
    patiently,
    plan_of,
    require_width,
)

_LOG = logging.getLogger(__name__)

_MAX_FAILURES = 10  # in one call of sample()


class RLMeshMultiAgentEnvRunner(MultiAgentEnvRunner):
    """Samples from endpoints whose lanes hold several agents each.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig; which policy an agent is
    mapped to, the config's ``multi_agent`` says. The episodes, connectors, callbacks and metrics
    are RLlib's own.

    When a session breaks, the running episodes of this runner are dropped and new sessions
    are opened, at the endpoint's new address if it has restarted. The error leaves ``sample`` only
    after ten failures in one call, since RLlib ends the actor for it; one that no other session
    could mend leaves it at once.
    """

    env: Any
    _num_failures = 0

    @override(MultiAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[MultiAgentEpisode]:
        """Sample as RLlib's own runner does; see ``MultiAgentEnvRunner.sample``."""
        self._num_failures = 0
        return list(super().sample(**kwargs))

    @override(MultiAgentEnvRunner)
    def make_env(self) -> None:
        """Open this runner's sessions.

        Raises:
            ConfigurationError: The config was not made by ``configure``.
            ContractMismatchError: An endpoint is not what it was on the driver.
            EndpointError: An endpoint stays away, in spite of repeated attempts.
        """
        plan = plan_of(self.config)
        # Before anything can fail: the episodes that were running are gone in any case.
        self._needs_initial_reset = True
        if self.env is not None:
            self.env.close()
        endpoints = plan.endpoints_of(
            self.worker_index or 0, in_evaluation=bool(self.config.in_evaluation)
        )
        self.num_envs = len(endpoints) * plan.contract.num_envs
        require_width(self.config, self.num_envs)
        sessions = patiently(partial(open_sessions, plan, endpoints))
        self.env = MultiAgentLaneGroup(sessions, plan.contract)
        announce_environment(self)

    @override(MultiAgentEnvRunner)
    def _try_env_reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, Any]:
        """Reset all lanes, on new sessions if the old ones fail."""
        while True:
            try:
                with self.metrics.log_time(ENV_RESET_TIMER):
                    observations, infos = self.env.reset(seed=seed, options=options)
                return observations, infos
            except RlmeshError as error:
                self._start_over(error)

    @override(MultiAgentEnvRunner)
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
        # Actions that do not fit were never sent; they would be the same again.
        if isinstance(error, ConformanceError) or self._num_failures > _MAX_FAILURES:
            raise error
        _LOG.warning(
            "worker %s: %s; its running episodes are dropped, new sessions are opened (%d/%d)",
            self.worker_index,
            error,
            self._num_failures,
            _MAX_FAILURES,
        )
        self.make_env()
