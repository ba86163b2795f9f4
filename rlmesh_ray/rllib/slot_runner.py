"""How a runner samples from slots: each is stepped, lost and opened again by itself.

RLlib has two EnvRunners, for one agent and for several; this is what both are here. What differs
between them is in ``lane_episodes`` and ``agent_episodes``.
"""

import abc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ray.rllib.env.env_runner import NUM_ENV_STEP_FAILURES_LIFETIME, EnvRunner
from ray.rllib.utils.metrics import RLMODULE_INFERENCE_TIMER

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.arrivals import Arrivals
from rlmesh_ray.rllib.lane_slot import Arrival, Group, LaneSlot, Phase
from rlmesh_ray.rllib.opening import (
    announce_environment,
    open_sessions,
    patiently,
    plan_of,
    require_width,
)
from rlmesh_ray.rllib.plan import RolloutPlan
from rlmesh_ray.rllib.quota import Quota

_LOG = logging.getLogger(__name__)

NUM_EPISODES_INTERRUPTED_LIFETIME = "num_episodes_interrupted_lifetime"
"""Metric: episodes that a failure has cut short."""
_PART_OF_SAMPLE_TIMEOUT = 0.5
"""How long ``sample`` waits for endpoints that are all away, before it returns what it has."""


@dataclass(slots=True)
class Lanes:
    """What the runner remembers of one slot's lanes between two steps."""

    slot: LaneSlot
    shared_data: dict[str, Any]
    """RLlib's connectors hand things to each other in this, between one step's two pipelines."""
    to_module: Any = None
    """The next forward pass's input."""
    actions: Any = None
    """As the module gave them, for the episodes; what the environment got may differ."""
    extras: dict[str, Any] | None = None
    """Everything else that the module gave, one row a lane."""
    num_asked: int = 0
    """Timesteps that are on their way."""


class SlotRunner(EnvRunner):
    """Samples from endpoints instead of environments in this process.

    The sessions of a runner are independent of each other: each is stepped as soon as its own
    answer is there. With a single session everything happens in the order of RLlib's own runner.

    When a session breaks, its running episodes end where they stand, as truncated, with the cause
    in their last info (``cut_short.INTERRUPTED_KEY``), and are returned with the others; they count
    neither as episodes nor in their mean return. A new session is opened, at the endpoint's new
    address if it has restarted, while the other sessions go on. Where all endpoints are away,
    ``sample`` returns what it has after half of ``sample_timeout_s``. An error leaves it only when
    an environment has raised ten times in a row, when all endpoints have been away for two
    minutes, or when another try would be pointless; RLlib ends the actor then.
    """

    group_class: ClassVar[Callable[..., Group]]
    """Makes one group of open sessions and their contract."""
    env_class: ClassVar[Callable[..., Any]]
    """Makes what RLlib sees as the environment; see ``LaneEnv``."""

    env: Any
    num_envs: int
    _lanes: Sequence[Lanes] = ()
    _arrivals: Arrivals[Arrival]
    _explore: bool
    _random_actions: bool
    _quota: Quota
    _deadline_s: float | None
    _ongoing_episodes: list[Any]
    _returned: list[Any]
    _interrupted: list[Any]

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
        groups = plan.groups_of(
            self.worker_index or 0, in_evaluation=bool(self.config.in_evaluation)
        )
        self._arrivals = Arrivals(len(groups))
        slots: list[LaneSlot] = []
        first = 0
        for endpoints in groups:
            end = first + len(endpoints) * plan.contract.num_envs
            opening = partial(_open_group, type(self).group_class, plan, endpoints)
            slots.append(LaneSlot(range(first, end), opening, self._arrivals))
            first = end
        self.env = type(self).env_class(
            plan.contract, first, partial(_close, slots, self._arrivals), partial(_call, slots)
        )
        self.num_envs = first
        try:
            require_width(self.config, self.num_envs)
            for slot in slots:
                patiently(slot.open)
        except BaseException:
            self.env.close()
            raise
        self._lanes = [Lanes(slot, {}) for slot in slots]
        announce_environment(self)

    # --- what differs with the number of agents -----------------------------------------

    @abc.abstractmethod
    def _act(self, lanes: Lanes) -> None:
        """Choose actions for a slot's lanes and send them off."""

    @abc.abstractmethod
    def _add_resets(self, lanes: Lanes, arrived: Any) -> None:
        """Begin the episodes of a slot whose lanes have all been reset."""

    @abc.abstractmethod
    def _add_steps(self, lanes: Lanes, arrived: Any) -> None:
        """Continue the episodes of a slot; those that have ended begin anew with the next step."""

    @abc.abstractmethod
    def _cut_short(self, lane: int, error: RlmeshError) -> Any | None:
        """End a lane's running episode; return it unless all it holds has been returned before."""

    @abc.abstractmethod
    def _cut_ongoing(self) -> list[Any]:
        """Return the chunks of the running episodes; the next call of ``sample`` goes on there."""

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
        self._quota = Quota(num_timesteps, num_episodes)
        self._returned, self._interrupted = [], []
        self._deadline_s = self._sample_deadline_s()
        try:
            if force_reset or num_episodes is not None or self._needs_initial_reset:
                self._reset_envs_and_episodes(explore)
            self._fill_quota()
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
            for lanes in self._lanes:
                if lanes.slot.phase is Phase.IDLE and self._quota.is_open:
                    self._act(lanes)
            if not self._take_arrival():
                break

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
        timeout_s = None
        if self._deadline_s is not None and self._are_all_away:
            timeout_s = self._deadline_s - time.monotonic()
            if timeout_s <= 0:
                return False
        arrival = self._arrivals.take(timeout_s)
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
            slot.patience.succeeded()
            self._add_steps(lanes, arrival.batch)
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

    # --- failures ------------------------------------------------------------------------

    def _open_anew(self, lanes: Lanes, error: RlmeshError) -> None:
        """End the episodes of a slot that has failed, and have it opened again.

        Raises:
            RlmeshError: There is no use in that: ``error`` itself.
        """
        slot = lanes.slot
        if slot.phase is not Phase.OPENING:
            self.metrics.log_value(NUM_ENV_STEP_FAILURES_LIFETIME, 1, reduce="lifetime_sum")
        slot.phase = Phase.OPENING
        self._interrupt(slot, error)
        others_work = any(other.slot.phase is not Phase.OPENING for other in self._lanes)
        delay_s = slot.patience.failed(error, time.monotonic(), others_work=others_work)
        if delay_s is None:
            # Whoever calls again gets another try.
            slot.patience.succeeded()
            slot.reopen(0.0)
            raise error
        _LOG.warning(
            "worker %s, lanes %d to %d: %s; a new session is opened in %.2g s (failure %d)",
            self.worker_index,
            slot.lanes.start,
            slot.lanes.stop - 1,
            error,
            delay_s,
            slot.patience.num_failures,
        )
        lanes.to_module = None
        lanes.shared_data = {}
        slot.reopen(delay_s)

    def _interrupt(self, slot: LaneSlot, error: RlmeshError) -> None:
        for lane in slot.lanes:
            episode = self._ongoing_episodes[lane]
            if not episode.is_reset:
                continue  # nothing has happened in it
            returned = self._cut_short(lane, error)
            self._count_interrupted(episode.id_)
            if returned is not None:
                self._interrupted.append(returned)

    def _count_interrupted(self, episode_id: str) -> None:
        self._ongoing_episodes_for_metrics.pop(episode_id, None)
        self.metrics.log_value(NUM_EPISODES_INTERRUPTED_LIFETIME, 1, reduce="lifetime_sum")


def _open_group(
    group_class: Callable[..., Group], plan: RolloutPlan, endpoints: Sequence[int]
) -> Group:
    return group_class(open_sessions(plan, endpoints), plan.contract)


def _call(slots: Sequence[LaneSlot], name: str, arguments: tuple[object, ...]) -> tuple[Any, ...]:
    return tuple(result for slot in slots for result in slot.call(name, arguments))


def _close(slots: Sequence[LaneSlot], arrivals: Arrivals[Arrival]) -> None:
    for slot in slots:
        slot.close()
    arrivals.close()
