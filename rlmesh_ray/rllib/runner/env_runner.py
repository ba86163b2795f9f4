"""RLMeshEnvRunner and RLMeshMultiAgentEnvRunner: RLlib's env runners, with lanes at endpoints."""

import logging
from functools import partial
from typing import Any

from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import (
    NUM_AGENT_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED,
)

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.inference_choice import InferenceChoice
from rlmesh_ray.models.rllib.compiled_module import CompiledModule
from rlmesh_ray.models.rllib.forward import compiled_forward
from rlmesh_ray.rllib.config.rollout_plan import plan_of
from rlmesh_ray.rllib.runner.fast_path import FastPath, ineligibility
from rlmesh_ray.rllib.runner.multi_agent_path import MultiAgentPath
from rlmesh_ray.rllib.runner.runner_env import MultiAgentRunnerEnv, RunnerEnv
from rlmesh_ray.rllib.runner.sample_recording import NO_SEVERAL_AGENTS, RecordingEnvRunner
from rlmesh_ray.rllib.runner.sampling_path import SamplingPath
from rlmesh_ray.rllib.runner.session_group import MultiAgentSessionGroup, SingleAgentSessionGroup
from rlmesh_ray.rllib.runner.single_agent_path import SingleAgentPath
from rlmesh_ray.rllib.runner.slot_runner import SlotRunner

_LOG = logging.getLogger(__name__)

LANES_AS_ARRAYS = "lanes_as_arrays"
"""Metric: 1.0 where a runner takes the fast path, 0.0 where it takes RLlib's per-item path."""
COMPILED_INFERENCE = "compiled_inference"
"""Metric: 1.0 where a runner's module runs compiled, 0.0 where it runs in torch."""


class RLMeshEnvRunner(SlotRunner, RecordingEnvRunner):
    """Samples from endpoints whose lanes hold one agent each; see ``SlotRunner`` for failures.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig. The episodes, connectors,
    callbacks and metrics are RLlib's own, and so are the files where ``offline_data(output=...)``
    is set.

    It takes the fast path, unless there is an ``ineligibility``. That is checked in each call of
    ``sample``, and the module's output in each step; the fast path begins with new episodes only.
    Changes are logged, and each call is counted (``LANES_AS_ARRAYS``).
    """

    group_class = SingleAgentSessionGroup
    env_class = RunnerEnv
    path_class = SingleAgentPath

    fast_path_disabled_reason: str | None = "nothing has been sampled yet"
    """Why the runner takes RLlib's per-item path; None: it takes the fast path."""

    @property
    def torch_inference_reason(self) -> str | None:
        """Why the last call of ``sample`` ran the module in torch; None: it ran compiled."""
        choice = self._last_inference_choice
        return "nothing has been sampled yet" if choice is None else choice.torch_reason

    def __init__(self, **kwargs: Any) -> None:
        self._inference_choices: dict[tuple[bool, bool], tuple[Any, InferenceChoice]] = {}
        self._last_inference_choice: InferenceChoice | None = None
        super().__init__(**kwargs)

    def _sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        for _, choice in self._inference_choices.values():
            choice.load()
        try:
            episodes = super()._sample(**kwargs)
        except ConfigurationError as error:
            if self._last_inference_choice is not None and self._last_inference_choice.refusal:
                self.broken_environment = error
            raise
        call = self.sampling.call
        num_steps = call.timesteps
        if num_steps:
            self._log_env_steps(self._metrics_num_env_steps_sampled, num_steps)
        self._increase_sampled_metrics(num_steps, len(call.returned))
        is_fast = self.fast_path_disabled_reason is None
        self.metrics.log_value(LANES_AS_ARRAYS, float(is_fast), window=1)
        is_compiled = self.torch_inference_reason is None
        self.metrics.log_value(COMPILED_INFERENCE, float(is_compiled), window=1)
        return episodes

    def _choose_path(self) -> None:
        reason = ineligibility(self)
        self.take_path(SingleAgentPath(self) if reason else FastPath(self), reason)

    def inference_choice(self, *, explore: bool, draws: bool) -> InferenceChoice:
        """Return what runs the module; the same one as long as the module is the same.

        Args:
            explore: Whether it explores.
            draws: Whether actions are drawn with it, as on the fast path. On RLlib's per-item path
                a connector draws them.
        """
        module, choice = self._inference_choices.get((explore, draws), (None, None))
        if choice is None or module is not self.module:
            compiled = partial(CompiledModule, seed=self._seed) if draws else compiled_forward
            compile_module = partial(compiled, self.module, explore=explore)
            inference = plan_of(self.config).inference
            choice = InferenceChoice(inference, compile_module)
            self._inference_choices[explore, draws] = self.module, choice
        self._last_inference_choice = choice
        return choice

    def take_path(self, path: SamplingPath, fast_path_disabled_reason: str | None) -> None:
        """Sample by ``path`` from now on, and log a change."""
        self.sampling.path = path
        if fast_path_disabled_reason == self.fast_path_disabled_reason:
            return
        self.fast_path_disabled_reason = fast_path_disabled_reason
        state = f"off: {fast_path_disabled_reason}" if fast_path_disabled_reason else "on"
        _LOG.info("worker %s: the fast path is %s", self.worker_index, state)


class RLMeshMultiAgentEnvRunner(SlotRunner, MultiAgentEnvRunner):
    """Samples from endpoints whose lanes hold several agents each; see ``SlotRunner`` for failures.

    ``rlmesh_ray.rllib.configure`` puts it into an AlgorithmConfig, whose ``multi_agent`` maps
    agents to policies. The episodes, connectors, callbacks and metrics are RLlib's own.
    """

    group_class = MultiAgentSessionGroup
    env_class = MultiAgentRunnerEnv
    path_class = MultiAgentPath

    def make_env(self) -> None:
        """Open this runner's sessions; see ``SlotRunner``.

        Raises:
            ConfigurationError: Also where the config sets ``offline_data(output=...)``.
        """
        if self.config.output:  # set after ``configure``, which refuses it, too
            raise ConfigurationError(NO_SEVERAL_AGENTS)
        super().make_env()

    def count_step(self, observations: Any, episode: MultiAgentEpisode) -> None:
        """Count a step of a lane, in RLlib's metrics.

        Args:
            observations: Those that it has led to, by agent.
            episode: The lane's episode, which has the step.
        """
        self._log_env_steps(self._metrics_num_env_steps_sampled, 1)
        self._increase_sampled_metrics(1, observations, episode)

    def prune(self, episode: MultiAgentEpisode) -> None:
        """Drop the agents of an episode that have not stepped."""
        self._prune_zero_len_sa_episodes(episode)

    def get_metrics(self) -> Any:
        """Return the metrics since the last call, as RLlib's runner does, with a 0 for no steps.

        RLlib makes the counts integers. Its runner reports NaN for an agent or module that was
        absent.
        """
        for key in (NUM_AGENT_STEPS_SAMPLED, NUM_MODULE_STEPS_SAMPLED):
            for name in self.metrics.peek(key, default={}):
                self.metrics.log_value((key, name), 0, reduce="sum")
        self.metrics.log_value(NUM_ENV_STEPS_SAMPLED, 0, reduce="sum")
        return super().get_metrics()
