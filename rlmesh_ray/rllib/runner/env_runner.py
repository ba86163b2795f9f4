"""RLMeshEnvRunner and RLMeshMultiAgentEnvRunner: RLlib's env runners, with lanes at endpoints.

RLlib has one EnvRunner for lanes with one agent and one for lanes with several; the sampling loop
of ``SlotRunner`` is the same in both: each slot is stepped, lost and reopened alone. What differs
is in the ``SamplingPath`` that the runner holds.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import (
    NUM_AGENT_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED,
)

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError, RlmeshError
from rlmesh_ray.models.onnx.compiled_forward import CompiledForward, InferenceChoice
from rlmesh_ray.models.rllib.forward import CompiledModule, bare_forward
from rlmesh_ray.rllib.config.rollout_plan import RolloutPlan, plan_of
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments, assignments_for
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.fast_path import FastPath, ineligibility
from rlmesh_ray.rllib.runner.runner_env import MultiAgentRunnerEnv, RunnerEnv, announce_environment
from rlmesh_ray.rllib.runner.sample_recording import RecordingEnvRunner
from rlmesh_ray.rllib.runner.sampling_path import (
    MultiAgentPath,
    PerItemPath,
    SampleCall,
    SamplingPath,
    SamplingState,
    SingleAgentPath,
)
from rlmesh_ray.rllib.runner.session_group import (
    MultiAgentSessionGroup,
    SessionGroup,
    SingleAgentSessionGroup,
)
from rlmesh_ray.rllib.runner.session_recovery import (
    LIFETIME_SUMS,
    move_sessions,
    note_reopened,
    reopen,
)
from rlmesh_ray.rllib.runner.slot import RetryPolicy, Slot, SlotPhase, SlotResult
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap

_LOG = logging.getLogger(__name__)

LANES_AS_ARRAYS = "lanes_as_arrays"
"""Metric: 1.0 where a runner takes the fast path, 0.0 where it takes RLlib's per-item path."""
COMPILED_INFERENCE = "compiled_inference"
"""Metric: 1.0 where a runner's module runs compiled, 0.0 where it runs in torch."""

_PART_OF_SAMPLE_TIMEOUT = 0.5
"""How long ``sample`` waits while all endpoints are away, before it returns what it has."""
_OPEN_TIMEOUT_S = 30.0
"""How long to wait for endpoints that are away when a runner is made."""


class SlotRunner(EnvRunner):
    """Samples from endpoints instead of environments in this process.

    The sessions of a runner are independent of each other: each is stepped as soon as its own
    answer has arrived. With a single session everything happens in the order of RLlib's own runner.

    When a session breaks, its running episodes end as truncated, with the cause in their last info
    (``session_recovery.INTERRUPTED_KEY``), and are returned with the others; they count neither as
    episodes nor in their mean return. A new session is opened, at the endpoint's new address if it
    has restarted, while the other sessions go on. Where all endpoints are away, ``sample`` returns
    what it has after half of ``sample_timeout_s``. It raises only when an environment has failed
    eleven times without finishing an episode, when all endpoints have been away for two minutes, or
    when another attempt would be pointless; RLlib ends the actor then.

    A session that the registry asks to move, since the fleet grows or shrinks, is opened elsewhere
    when ``sample`` ends. Its episodes are truncated in the same way, but that is no failure.
    """

    group_class: ClassVar[Callable[..., SessionGroup]]
    """Makes one group of open sessions and their contract."""
    env_class: ClassVar[Callable[..., Any]]
    """Makes what RLlib sees as the environment; see ``RunnerEnv``."""
    path_class: ClassVar[type[PerItemPath]]
    """RLlib's per-item path for these lanes."""

    first_failure = ""
    """The first failure that truncated episodes of this runner, and its lanes; empty: none has."""
    broken_environment: RlmeshError | None = None
    """Why the last call of ``sample`` gave up for good; see ``raise_for_broken_environment``."""

    env: Any
    num_envs: int
    _completions: CompletionQueue[SlotResult]

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        self.sampling = SamplingState()
        self.sampling.path = type(self).path_class(self)
        super().__init__(config=config, **kwargs)
        if self.worker_index:  # else it is in the process of the program that trains
            freeze_heap()
        for name in LIFETIME_SUMS:  # so that results have a 0 before the first failure
            self.metrics.log_value(name, 0, reduce="lifetime_sum")

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
        assignments = assignments_for(
            plan, self.worker_index, in_evaluation=bool(self.config.in_evaluation)
        )
        num_sessions = len(assignments.endpoints)
        self._completions = CompletionQueue(1 if plan.lockstep else num_sessions)
        slots = self._new_slots(plan, assignments)
        self.sampling.assignments = assignments
        self.num_envs = num_sessions * plan.contract.num_envs
        self.env = type(self).env_class(
            plan.contract,
            self.num_envs,
            partial(_close, slots, self._completions, assignments),
            lambda name, args: tuple(one for slot in slots for one in slot.call(name, args)),
        )
        try:
            if self.num_envs != self.config.num_envs_per_env_runner:
                raise ContractMismatchError(
                    f"num_envs_per_env_runner={self.config.num_envs_per_env_runner}, but the "
                    f"endpoints give {self.num_envs} lanes; do not change it after "
                    "rlmesh_ray.rllib.configure"
                )
            for slot in slots:
                _open_with_retries(slot)
        except BaseException:
            self.env.close()
            raise
        self.sampling.slots = slots
        announce_environment(self)

    def _new_slots(self, plan: RolloutPlan, assignments: SessionAssignments) -> list[Slot]:
        """Return one slot for each session, or one for all in lockstep; none is open yet."""

        def open_group(sessions: range) -> SessionGroup:
            return type(self).group_class(assignments.open(sessions), plan.contract)

        total, width = len(assignments.endpoints), plan.contract.num_envs
        size = total if plan.lockstep else 1
        return [
            Slot(
                range(first * width, (first + size) * width),
                partial(open_group, range(first, first + size)),
                self._completions,
                range(first, first + size),
            )
            for first in range(0, total, size)
        ]

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func`` with this runner, as RLlib's runners do.

        RLlib ends a runner that raises, after a minute, and starts another one in its place. That
        does not repair an environment, nor a module that has to be compiled and cannot be: such
        an error is raised to the caller instead.
        """
        broken: list[RlmeshError] = []

        def call(runner: SlotRunner, *args: Any, **kwargs: Any) -> Any:
            try:
                return func(runner, *args, **kwargs)
            except RlmeshError as error:
                if error is not runner.broken_environment:
                    raise
                broken.append(error)

        result = super().apply(call, *args, **kwargs)
        if broken:
            raise broken[0]
        return result

    def _choose_path(self) -> None:
        """Choose the strategy for new episodes in all lanes."""
        self.sampling.path = type(self).path_class(self)

    # --- RLlib's private parts, for the path ------------------------------------------------

    @property
    def pipelines(self) -> tuple[Any, Any]:
        """RLlib's connectors: env-to-module and module-to-env."""
        return self._env_to_module, self._module_to_env

    def begin_episode(self, lane: int) -> None:
        """Put a new episode into a lane."""
        self._new_episode(lane, self.sampling.episodes)

    def call_back(self, which: str, lane: int) -> None:
        """Call the callbacks on the episode of a lane."""
        self._make_on_episode_callback(which, lane, self.sampling.episodes)

    def count_attempts(self, num_steps: int) -> None:
        """Count steps that were sent, in RLlib's metric of Ray."""
        self._log_env_steps(self._metrics_num_try_env_step, num_steps)

    def keep_chunk(self, chunk: Any) -> None:
        """Keep a chunk of a running episode for the metrics of the whole one."""
        self._ongoing_episodes_for_metrics[chunk.id_].append(chunk)

    def forget_chunks(self, episode_id: str) -> None:
        """Forget the chunks of an episode that does not count."""
        self._ongoing_episodes_for_metrics.pop(episode_id, None)

    def _sample(
        self,
        *,
        num_timesteps: int | None = None,
        num_episodes: int | None = None,
        explore: bool,
        random_actions: bool = False,
        force_reset: bool = False,
    ) -> list[Any]:
        """Sample as RLlib's own runner does, each session at its own pace."""
        sampling = self.sampling
        call = sampling.call = SampleCall(
            num_timesteps,
            num_episodes,
            explore,
            random_actions,
            self._weights_seq_no,
            self._sample_deadline_s(),
        )
        self.broken_environment = None
        try:
            if force_reset or num_episodes is not None or self._needs_initial_reset:
                self._choose_path()
                self._reset_envs_and_episodes(explore)
            else:
                sampling.path.resume()
            while not call.is_full:
                sampling.path.act_on([s for s in sampling.slots if s.phase is SlotPhase.IDLE])
                if not self._take_results():
                    break
            move_sessions(self)
            ongoing = sampling.path.conclude(continues=num_timesteps is not None)
        except BaseException:
            # Perhaps a callback's error between two steps: the episodes cannot continue there.
            self._needs_initial_reset = True
            raise
        finally:
            sampling.path.finish()
        if num_episodes is not None:
            self._needs_initial_reset = True
        self._done_episodes_for_metrics.extend(call.returned)
        return call.returned + call.interrupted + ongoing

    def _take_results(self) -> bool:
        """Wait for the next result, and take those that have arrived by then, too.

        So their slots can share a forward pass. False: waiting longer is pointless.
        """
        while self._take_result():
            if self.sampling.call.is_full or not self._completions.is_ready:
                return True
        return False

    def _reset_envs(self, episodes: list[Any], shared_data: dict[str, Any], explore: bool) -> None:
        """Start new episodes in all lanes; those of lost sessions start once these are reopened."""
        self.sampling.episodes = episodes
        for lane in range(self.num_envs):
            self._new_episode(lane, episodes)
        self._ongoing_episodes_for_metrics.clear()
        seed = self._seed if self._needs_initial_reset else None
        for slot in self.sampling.slots:
            slot.shared_data = {}
            slot.num_in_flight = 0  # the results of steps in flight are ignored
            if slot.phase is not SlotPhase.OPENING:
                seeds = () if seed is None else [seed + lane for lane in slot.lanes]
                slot.reset(seeds)
        while any(slot.phase is SlotPhase.RESETTING for slot in self.sampling.slots):
            if not self._take_result():
                break

    def _sample_deadline_s(self) -> float | None:
        # RLlib has no time limit for the local runner.
        limit_s = self.config.sample_timeout_s
        if not self.worker_index or limit_s is None:
            return None
        return time.monotonic() + _PART_OF_SAMPLE_TIMEOUT * float(limit_s)

    def _take_result(self) -> bool:
        """Wait for the next result and process it; return False where waiting is pointless."""
        sampling = self.sampling
        sampling.assignments.request_rebalance()  # costs no time: steps are in flight
        timeout_s = None
        deadline_s = sampling.call.deadline_s
        if deadline_s is not None and all(s.phase is SlotPhase.OPENING for s in sampling.slots):
            timeout_s = deadline_s - time.monotonic()
            if timeout_s <= 0:
                return False
        result = self._completions.take(timeout_s, sampling.path.work_ahead)
        if result is None:
            return False
        if result.work == result.slot.work:
            self._process(result.slot, result)
        return True

    def _process(self, slot: Slot, result: SlotResult) -> None:
        path, call, phase = self.sampling.path, self.sampling.call, slot.phase
        call.in_flight -= slot.num_in_flight
        slot.num_in_flight = 0
        if result.batch is None:
            assert result.error is not None
            reopen(self, slot, result.error)
            return
        slot.phase = SlotPhase.IDLE
        if phase is SlotPhase.OPENING:
            note_reopened(self, slot)
        if phase is not SlotPhase.STEPPING:
            path.add_resets(slot, result.batch)
            return
        timesteps, episodes = call.timesteps, call.episodes
        path.add_steps(slot, result.batch)
        if call.timesteps > timesteps:
            slot.retry.succeeded()
        if call.episodes > episodes:
            slot.retry.finished_episode()


def _open_with_retries(slot: Slot) -> None:
    """Open a slot; it is tried again while endpoints are restarting.

    Raises:
        RlmeshError: It could not be opened.
    """
    retry = RetryPolicy(_OPEN_TIMEOUT_S)
    while True:
        try:
            slot.open()
        except RlmeshError as error:
            delay_s = retry.failed(error, time.monotonic())
            if delay_s is None:
                raise
            _LOG.info("%s; trying again in %.2g s", error, delay_s)
        else:
            return
        time.sleep(delay_s)


def _close(
    slots: Sequence[Slot],
    completions: CompletionQueue[SlotResult],
    assignments: SessionAssignments,
) -> None:
    for slot in slots:
        slot.close()
    completions.close()
    assignments.release()


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
        return "nothing has been sampled yet" if choice is None else choice.torch_reason()

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
            call = partial(bare_forward, explore=explore)
            compile_module = (
                partial(CompiledModule, self.module, explore=explore, seed=self._seed)
                if draws
                else partial(CompiledForward, self.module, call=call)
            )
            choice = InferenceChoice(plan_of(self.config).inference, compile_module)
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
