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

from rlmesh_ray.rllib.arrivals import Arrivals
from rlmesh_ray.rllib.lane_slot import Arrival, Group, Phase
from rlmesh_ray.rllib.lost_and_moved import LostAndMoved
from rlmesh_ray.rllib.opening import (
    announce_environment,
    patiently,
    plan_of,
    require_width,
    seats_for,
)
from rlmesh_ray.rllib.quota import Quota
from rlmesh_ray.rllib.runner_lanes import Lanes, call_lanes, close_lanes, lanes_of

_PART_OF_SAMPLE_TIMEOUT = 0.5
"""How long ``sample`` waits for endpoints that are all away, before it returns what it has."""


class SlotRunner(LostAndMoved):
    """Samples from endpoints instead of environments in this process.

    The sessions of a runner are independent of each other: each is stepped as soon as its own
    answer is there. With a single session everything happens in the order of RLlib's own runner.

    When a session breaks, its running episodes end where they stand, as truncated, with the cause
    in their last info (``cut_short.INTERRUPTED_KEY``), and are returned with the others; they count
    neither as episodes nor in their mean return. A new session is opened, at the endpoint's new
    address if it has restarted, while the other sessions go on. Where all endpoints are away,
    ``sample`` returns what it has after half of ``sample_timeout_s``. An error leaves it only when
    an environment has failed ten times without finishing an episode, when all endpoints have been
    away for two minutes, or when another try would be pointless; RLlib ends the actor then.

    A session that its directory asks to move, since the fleet grows or shrinks, is opened elsewhere
    when ``sample`` ends. Its episodes are cut in the same way, but that is no failure.
    """

    group_class: ClassVar[Callable[..., Group]]
    """Makes one group of open sessions and their contract."""
    env_class: ClassVar[Callable[..., Any]]
    """Makes what RLlib sees as the environment; see ``LaneEnv``."""

    env: Any
    num_envs: int
    _arrivals: Arrivals[Arrival]
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
        self._seats = seats_for(self, plan)
        num_sessions = len(self._seats.endpoints)
        self._arrivals = Arrivals(1 if plan.lockstep else num_sessions)
        all_lanes = lanes_of(plan, self._seats, self._arrivals, type(self).group_class)
        self.num_envs = num_sessions * plan.contract.num_envs
        self.env = type(self).env_class(
            plan.contract,
            self.num_envs,
            partial(close_lanes, all_lanes, self._arrivals, self._seats),
            partial(call_lanes, all_lanes),
        )
        try:
            require_width(self.config, self.num_envs)
            for lanes in all_lanes:
                patiently(lanes.slot.open)
        except BaseException:
            self.env.close()
            raise
        self._lanes = all_lanes
        announce_environment(self)

    # --- what differs with the number of agents -----------------------------------------

    @abc.abstractmethod
    def _act(self, lanes: Lanes) -> None:
        """Choose actions for a slot's lanes and send them off."""

    def _act_on(self, idle: Sequence[Lanes]) -> None:
        """Choose and send actions for slots that wait for them, as long as the quota is open."""
        for lanes in idle:
            if self._quota.is_open:
                self._act(lanes)

    @abc.abstractmethod
    def _add_resets(self, lanes: Lanes, arrived: Any) -> None:
        """Begin the episodes of a slot whose lanes have all been reset."""

    @abc.abstractmethod
    def _add_steps(self, lanes: Lanes, arrived: Any) -> None:
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
        self._quota = Quota(num_timesteps, num_episodes)
        self._returned, self._interrupted = [], []
        self._deadline_s = self._sample_deadline_s()
        try:
            if force_reset or num_episodes is not None or self._needs_initial_reset:
                self._reset_envs_and_episodes(explore)
            self._fill_quota()
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

    def _fill_quota(self) -> None:
        while not self._quota.is_full:
            self._act_on([lanes for lanes in self._lanes if lanes.slot.phase is Phase.IDLE])
            if not self._take_arrivals():
                break

    def _take_arrivals(self) -> bool:
        """Wait for what arrives next, and take what else is there: it can share a forward pass.

        False: it is no use to wait any longer.
        """
        while self._take_arrival():
            if self._quota.is_full or not self._arrivals.is_there:
                return True
        return False

    def _reset_envs(self, episodes: list[Any], shared_data: dict[str, Any], explore: bool) -> None:
        """Start new episodes in all lanes; those of lost sessions start when they are back."""
        for lane in range(self.num_envs):
            self._new_episode(lane, episodes)
        self._ongoing_episodes_for_metrics.clear()
        seed = self._seed if self._needs_initial_reset else None
        for lanes in self._lanes:
            lanes.shared_data = {}
            lanes.num_asked = 0  # nobody waits any more for what is on its way
            if lanes.slot.phase is not Phase.OPENING:
                seeds = () if seed is None else [seed + lane for lane in lanes.slot.lanes]
                lanes.slot.reset(seeds, None)
        while any(lanes.slot.phase is Phase.RESETTING for lanes in self._lanes):
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
        self._seats.ask()  # now, since it costs nobody time whose step is on its way
        timeout_s = None
        if self._deadline_s is not None and self._are_all_away:
            timeout_s = self._deadline_s - time.monotonic()
            if timeout_s <= 0:
                return False
        arrival = self._arrivals.take(timeout_s, self._work_ahead)
        if arrival is None:
            return False
        if arrival.slot.is_current(arrival):
            lanes = next(lanes for lanes in self._lanes if lanes.slot is arrival.slot)
            self._work_on(lanes, arrival)
        return True

    @property
    def _are_all_away(self) -> bool:
        return all(lanes.slot.phase is Phase.OPENING for lanes in self._lanes)

    def _work_on(self, lanes: Lanes, arrival: Arrival) -> None:
        slot, phase = lanes.slot, lanes.slot.phase
        self._quota.asked -= lanes.num_asked
        lanes.num_asked = 0
        if arrival.batch is None:
            assert arrival.error is not None
            self._open_anew(lanes, arrival.error)
            return
        slot.phase = Phase.IDLE
        if phase is Phase.STEPPING:
            num_before, num_over = self._quota.timesteps, self._quota.episodes
            self._add_steps(lanes, arrival.batch)
            if self._quota.timesteps > num_before:
                slot.patience.succeeded()
            if self._quota.episodes > num_over:
                slot.patience.finished_episode()
            if arrival.batch.discarded:
                self._count_discarded(lanes, arrival.batch.discarded)
        else:
            self._add_resets(lanes, arrival.batch)

    def _ask(self, lanes: Lanes, actions: Any, num_timesteps: int) -> None:
        """Send actions off, which are to bring ``num_timesteps``."""
        lanes.num_asked = num_timesteps
        self._quota.asked += num_timesteps
        lanes.slot.step(actions)
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
