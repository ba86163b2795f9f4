"""How a runner samples from slots: each is stepped, lost and opened again by itself.

RLlib has two EnvRunners, for one agent and for several; this is what both are here. What differs
between them is in ``lane_episodes`` and ``agent_episodes``.
"""

import abc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER

from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.sample_budget import SampleBudget
from rlmesh_ray.rllib.runner.session_recovery import SessionRecovery
from rlmesh_ray.rllib.runner.session_setup import (
    announce_environment,
    assignments_for,
    open_with_retries,
    plan_of,
    require_width,
)
from rlmesh_ray.rllib.runner.slot import SlotGroup, SlotPhase, SlotResult
from rlmesh_ray.rllib.runner.slot_state import SlotState, call_slots, close_slots, slots_of

_PART_OF_SAMPLE_TIMEOUT = 0.5
"""How long ``sample`` waits for endpoints that are all away, before it returns what it has."""


class SlotRunner(SessionRecovery):
    """Samples from endpoints instead of environments in this process.

    The sessions of a runner are independent of each other: each is stepped as soon as its own
    answer is there. With a single session everything happens in the order of RLlib's own runner.

    When a session breaks, its running episodes end where they stand, as truncated, with the cause
    in their last info (``truncate.INTERRUPTED_KEY``), and are returned with the others; they count
    neither as episodes nor in their mean return. A new session is opened, at the endpoint's new
    address if it has restarted, while the other sessions go on. Where all endpoints are away,
    ``sample`` returns what it has after half of ``sample_timeout_s``. An error leaves it only when
    an environment has failed ten times without finishing an episode, when all endpoints have been
    away for two minutes, or when another try would be pointless; RLlib ends the actor then.

    A session that its directory asks to move, since the fleet grows or shrinks, is opened elsewhere
    when ``sample`` ends. Its episodes are cut in the same way, but that is no failure.
    """

    group_class: ClassVar[Callable[..., SlotGroup]]
    """Makes one group of open sessions and their contract."""
    env_class: ClassVar[Callable[..., Any]]
    """Makes what RLlib sees as the environment; see ``RunnerEnv``."""

    env: Any
    num_envs: int
    _completions: CompletionQueue[SlotResult]
    _explore: bool
    _random_actions: bool
    _deadline_s: float | None
    _returned: list[Any]

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
            partial(call_slots, slots),
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

    # --- what differs with the number of agents -----------------------------------------

    @abc.abstractmethod
    def _act(self, state: SlotState) -> None:
        """Choose actions for a slot's lanes and send them off."""

    def _act_on(self, idle: Sequence[SlotState]) -> None:
        """Choose and send actions for slots that wait for them, as long as the quota is open."""
        for state in idle:
            if self._budget.is_open:
                self._act(state)

    @abc.abstractmethod
    def _add_resets(self, state: SlotState, batch: Any) -> None:
        """Begin the episodes of a slot whose lanes have all been reset."""

    @abc.abstractmethod
    def _add_steps(self, state: SlotState, batch: Any) -> None:
        """Continue the episodes of a slot; those that have ended begin anew with the next step."""

    @abc.abstractmethod
    def _cut_ongoing(self) -> list[Any]:
        """Return the chunks of the running episodes; the next call of ``sample`` goes on there."""

    def _work_ahead(self) -> bool:
        """Do a little of what ``_settle`` would do later; False: there was nothing to do."""
        return False

    def _settle(self) -> None:
        """Complete what is to be returned, where that has not been done step by step."""

    @abc.abstractmethod
    def _log_sampled(self) -> None:
        """Count what a call of ``sample`` has brought, where that has not been done yet."""

    # --- the loop ----------------------------------------------------------------------

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
        self._explore, self._random_actions = explore, random_actions
        self.broken_environment = None
        self._budget = SampleBudget(num_timesteps, num_episodes)
        self._returned, self._interrupted = [], []
        self._deadline_s = self._sample_deadline_s()
        try:
            if force_reset or num_episodes is not None or self._needs_initial_reset:
                self._reset_envs_and_episodes(explore)
            self._fill_budget()
            self._move_sessions()
        except BaseException:
            # Somewhere between two steps, a callback's error perhaps: nobody could go on there.
            self._needs_initial_reset = True
            raise
        if num_episodes is not None:
            self._needs_initial_reset = True
        self._settle()
        self._done_episodes_for_metrics.extend(self._returned)
        ongoing = self._cut_ongoing() if num_timesteps is not None else []
        self._log_sampled()
        return self._returned + self._interrupted + ongoing

    def _fill_budget(self) -> None:
        while not self._budget.is_full:
            self._act_on([state for state in self._slots if state.slot.phase is SlotPhase.IDLE])
            if not self._take_arrivals():
                break

    def _take_arrivals(self) -> bool:
        """Wait for what arrives next, and take what else is there: it can share a forward pass.

        False: it is no use to wait any longer.
        """
        while self._take_arrival():
            if self._budget.is_full or not self._completions.is_ready:
                return True
        return False

    def _reset_envs(self, episodes: list[Any], shared_data: dict[str, Any], explore: bool) -> None:
        """Start new episodes in all lanes; those of lost sessions start when they are back."""
        for lane in range(self.num_envs):
            self._new_episode(lane, episodes)
        self._ongoing_episodes_for_metrics.clear()
        seed = self._seed if self._needs_initial_reset else None
        for state in self._slots:
            state.shared_data = {}
            state.num_in_flight = 0  # nobody waits any more for what is on its way
            if state.slot.phase is not SlotPhase.OPENING:
                seeds = () if seed is None else [seed + lane for lane in state.slot.lanes]
                state.slot.reset(seeds, None)
        while any(state.slot.phase is SlotPhase.RESETTING for state in self._slots):
            if not self._take_arrival():
                break

    def _sample_deadline_s(self) -> float | None:
        # Nobody waits for the local runner with a watch in hand.
        limit_s = self.config.sample_timeout_s
        if not self.worker_index or limit_s is None:
            return None
        return time.monotonic() + _PART_OF_SAMPLE_TIMEOUT * float(limit_s)

    def _take_arrival(self) -> bool:
        """Work on what arrives next; return False when it is no use to wait any longer."""
        self._assignments.request_rebalance()  # costs no time: steps are on their way
        timeout_s = None
        if self._deadline_s is not None and self._are_all_away:
            timeout_s = self._deadline_s - time.monotonic()
            if timeout_s <= 0:
                return False
        arrival = self._completions.take(timeout_s, self._work_ahead)
        if arrival is None:
            return False
        if arrival.slot.is_current(arrival):
            state = next(state for state in self._slots if state.slot is arrival.slot)
            self._work_on(state, arrival)
        return True

    @property
    def _are_all_away(self) -> bool:
        return all(state.slot.phase is SlotPhase.OPENING for state in self._slots)

    def _work_on(self, state: SlotState, arrival: SlotResult) -> None:
        slot, phase = state.slot, state.slot.phase
        self._budget.in_flight -= state.num_in_flight
        state.num_in_flight = 0
        if arrival.batch is None:
            assert arrival.error is not None
            self._reopen(state, arrival.error)
            return
        slot.phase = SlotPhase.IDLE
        if phase is SlotPhase.STEPPING:
            num_before, num_over = self._budget.timesteps, self._budget.episodes
            self._add_steps(state, arrival.batch)
            if self._budget.timesteps > num_before:
                slot.retry.succeeded()
            if self._budget.episodes > num_over:
                slot.retry.finished_episode()
            if arrival.batch.discarded:
                self._count_discarded(state, arrival.batch.discarded)
        else:
            self._add_resets(state, arrival.batch)

    def _ask(self, state: SlotState, actions: Any, num_timesteps: int) -> None:
        """Send actions off, which are to bring ``num_timesteps``."""
        state.num_in_flight = num_timesteps
        self._budget.in_flight += num_timesteps
        state.slot.step(actions)
        self._log_env_steps(self._metrics_num_try_env_step, 1)

    def _forward(self, to_module: Any, sampled: int) -> Any:
        """Run the module; ``sampled`` environment steps have come in this call so far."""
        with self.metrics.log_time(RLMODULE_INFERENCE_TIMER):
            if not self._explore:
                return self.module.forward_inference(to_module)
            num_runners = self.config.num_env_runners or 1
            per_runner = self.num_env_steps_sampled_lifetime // num_runners
            return self.module.forward_exploration(
                to_module, t=(per_runner + sampled) * num_runners
            )
