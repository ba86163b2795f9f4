"""The sampling loop of this package's env runners: each slot is stepped, lost and reopened alone.

RLlib has one EnvRunner for lanes with one agent and one for lanes with several; this loop is the
same in both. What differs is in the ``SamplingPath`` that the runner holds.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_runner import EnvRunner

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.sample_budget import SampleBudget, SampleCall
from rlmesh_ray.rllib.runner.sampling_path import PerItemPath, SamplingPath
from rlmesh_ray.rllib.runner.session_recovery import LIFETIME_SUMS, SessionRecovery
from rlmesh_ray.rllib.runner.session_setup import (
    announce_environment,
    assignments_for,
    open_with_retries,
    plan_of,
    require_width,
)
from rlmesh_ray.rllib.runner.slot import SlotGroup, SlotPhase, SlotResult
from rlmesh_ray.rllib.runner.slot_state import SlotState, close_slots, slots_of
from rlmesh_ray.server.gc_tuning import freeze_heap

_PART_OF_SAMPLE_TIMEOUT = 0.5
"""How long ``sample`` waits while all endpoints are away, before it returns what it has."""


class SlotRunner(EnvRunner):
    """Samples from endpoints instead of environments in this process.

    The sessions of a runner are independent of each other: each is stepped as soon as its own
    answer has arrived. With a single session everything happens in the order of RLlib's own runner.

    When a session breaks, its running episodes end as truncated, with the cause in their last info
    (``truncation.INTERRUPTED_KEY``), and are returned with the others; they count neither as
    episodes nor in their mean return. A new session is opened, at the endpoint's new address if it
    has restarted, while the other sessions go on. Where all endpoints are away, ``sample`` returns
    what it has after half of ``sample_timeout_s``. It raises only when an environment has failed
    eleven times without finishing an episode, when all endpoints have been away for two minutes, or
    when another attempt would be pointless; RLlib ends the actor then.

    A session that the registry asks to move, since the fleet grows or shrinks, is opened elsewhere
    when ``sample`` ends. Its episodes are truncated in the same way, but that is no failure.
    """

    group_class: ClassVar[Callable[..., SlotGroup]]
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
    _ongoing_episodes: list[Any]
    _assignments: SessionAssignments
    _completions: CompletionQueue[SlotResult]
    _call: SampleCall
    """The current call of ``sample``, or the last one."""

    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any) -> None:
        self._slots: Sequence[SlotState] = ()
        self._path: SamplingPath = type(self).path_class(self)
        self._recovery = SessionRecovery(self)
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
        self._assignments = assignments_for(self, plan)
        num_sessions = len(self._assignments.endpoints)
        self._completions = CompletionQueue(1 if plan.lockstep else num_sessions)
        slots = slots_of(plan, self._assignments, self._completions, type(self).group_class)
        self.num_envs = num_sessions * plan.contract.num_envs
        self.env = type(self).env_class(
            plan.contract,
            self.num_envs,
            partial(close_slots, slots, self._completions, self._assignments),
            lambda name, args: tuple(one for each in slots for one in each.slot.call(name, args)),
        )
        try:
            require_width(self.config, self.num_envs)
            for state in slots:
                open_with_retries(state.slot.open)
        except BaseException:
            self.env.close()
            raise
        self._slots = slots
        announce_environment(self)

    def apply(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``func`` with this runner, as RLlib's runners do.

        RLlib ends a runner that raises, after a minute, and starts another one in its place. That
        does not repair an environment, nor a module that has to be compiled and cannot be: such
        an error is raised to the caller instead.
        """
        try:
            return super().apply(_let_escape(func), *args, **kwargs)
        except _EscapingError as caught:
            raise caught.error from None

    def _try_env_reset(self, **options: Any) -> Any:
        """Refuse a reset by RLlib's loop, which would recreate the environment endlessly."""
        return self.env.reset(**options)

    def _try_env_step(self, actions: Any) -> Any:
        """Refuse a step by RLlib's loop."""
        return self.env.step(actions)

    def _choose_path(self) -> None:
        """Choose the strategy for new episodes in all lanes."""
        self._path = type(self).path_class(self)

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
        budget = SampleBudget(num_timesteps, num_episodes)
        self._call = SampleCall(budget, explore, random_actions, self._sample_deadline_s())
        self.broken_environment = None
        try:
            if force_reset or num_episodes is not None or self._needs_initial_reset:
                self._choose_path()
                self._reset_envs_and_episodes(explore)
            else:
                self._path.resume()
            self._fill_budget()
            self._recovery.move_sessions()
            ongoing = self._path.conclude(continues=num_timesteps is not None)
        except BaseException:
            # Perhaps a callback's error between two steps: the episodes cannot continue there.
            self._needs_initial_reset = True
            raise
        finally:
            self._path.finish()
        if num_episodes is not None:
            self._needs_initial_reset = True
        self._done_episodes_for_metrics.extend(self._call.returned)
        return self._call.returned + self._call.interrupted + ongoing

    def _fill_budget(self) -> None:
        while not self._call.budget.is_full:
            self._path.act_on(
                [state for state in self._slots if state.slot.phase is SlotPhase.IDLE]
            )
            if not self._take_results():
                break

    def _take_results(self) -> bool:
        """Wait for the next result, and take those that have arrived by then, too.

        So their slots can share a forward pass. False: waiting longer is pointless.
        """
        while self._take_result():
            if self._call.budget.is_full or not self._completions.is_ready:
                return True
        return False

    def _reset_envs(self, episodes: list[Any], shared_data: dict[str, Any], explore: bool) -> None:
        """Start new episodes in all lanes; those of lost sessions start once these are reopened."""
        for lane in range(self.num_envs):
            self._new_episode(lane, episodes)
        self._ongoing_episodes_for_metrics.clear()
        seed = self._seed if self._needs_initial_reset else None
        for state in self._slots:
            state.shared_data = {}
            state.num_in_flight = 0  # the results of steps in flight are ignored
            if state.slot.phase is not SlotPhase.OPENING:
                seeds = () if seed is None else [seed + lane for lane in state.slot.lanes]
                state.slot.reset(seeds, None)
        while any(state.slot.phase is SlotPhase.RESETTING for state in self._slots):
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
        self._assignments.request_rebalance()  # costs no time: steps are in flight
        timeout_s = None
        if self._call.deadline_s is not None and self._are_all_away:
            timeout_s = self._call.deadline_s - time.monotonic()
            if timeout_s <= 0:
                return False
        result = self._completions.take(timeout_s, self._path.work_ahead)
        if result is None:
            return False
        if result.slot.is_current(result):
            state = next(state for state in self._slots if state.slot is result.slot)
            self._process(state, result)
        return True

    @property
    def _are_all_away(self) -> bool:
        return all(state.slot.phase is SlotPhase.OPENING for state in self._slots)

    def _process(self, state: SlotState, result: SlotResult) -> None:
        slot, phase, budget = state.slot, state.slot.phase, self._call.budget
        budget.in_flight -= state.num_in_flight
        state.num_in_flight = 0
        if result.batch is None:
            assert result.error is not None
            self._recovery.reopen(state, result.error)
            return
        slot.phase = SlotPhase.IDLE
        if phase is SlotPhase.OPENING:
            self._recovery.note_reopened(state)
        if phase is not SlotPhase.STEPPING:
            self._path.add_resets(state, result.batch)
            return
        timesteps, episodes = budget.timesteps, budget.episodes
        self._path.add_steps(state, result.batch)
        if budget.timesteps > timesteps:
            slot.retry.succeeded()
        if budget.episodes > episodes:
            slot.retry.finished_episode()
        if result.batch.discarded:
            self._recovery.count_discarded(state, result.batch.discarded)


class _EscapingError(BaseException):
    """Carries the error of a broken environment past RLlib's handler of any ``Exception``."""

    def __init__(self, error: RlmeshError) -> None:
        super().__init__(error)
        self.error = error


def _let_escape(func: Callable[..., Any]) -> Callable[..., Any]:
    def call(runner: SlotRunner, *args: Any, **kwargs: Any) -> Any:
        try:
            return func(runner, *args, **kwargs)
        except RlmeshError as error:
            if error is runner.broken_environment:
                raise _EscapingError(error) from error
            raise

    return call
