"""What a runner's sampling loop calls to choose actions and to build episodes: its strategy.

``FastPath`` processes all lanes of a slot as arrays. ``SingleAgentPath`` and ``MultiAgentPath`` are
RLlib's own per-item path: connectors, module and callbacks see the slot's lanes as they would see
all of the runner's, in RLlib's own order.
"""

import abc
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.rllib.utils.metrics import (
    ENV_TO_MODULE_CONNECTOR,
    MODULE_TO_ENV_CONNECTOR,
    RLMODULE_INFERENCE_TIMER,
)

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.runner.slot import Slot
from rlmesh_ray.rllib.runner.slot_state import SlotState

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.slot_runner import SlotRunner


class SamplingPath(abc.ABC):
    """Chooses actions for slots, and builds RLlib's episodes of their results.

    Results go into the runner's ``SampleCall``.
    """

    def resume(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare a call of ``sample`` that continues the running episodes."""

    @abc.abstractmethod
    def act_on(self, idle: Sequence[SlotState]) -> None:
        """Choose and send actions for idle slots, as long as the budget is open."""

    @abc.abstractmethod
    def add_resets(self, state: SlotState, batch: Any) -> None:
        """Begin the episodes of a slot whose lanes have all been reset."""

    @abc.abstractmethod
    def add_steps(self, state: SlotState, batch: Any) -> None:
        """Add a step to the episodes of a slot; a lane whose episode has ended begins a new one."""

    @abc.abstractmethod
    def interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        """Truncate a slot's running episodes, and return their number."""

    def work_ahead(self) -> bool:
        """Do a part of what ``conclude`` would do later; return False if nothing is left to do."""
        return False

    @abc.abstractmethod
    def conclude(self, *, continues: bool) -> list[Any]:
        """Complete the episodes of this call, and return chunks of those that are running.

        Args:
            continues: Whether the next call continues the running episodes; False: it resets all
                lanes, and nothing of them is returned.
        """

    def finish(self) -> None:  # noqa: B027  # most have nothing to do
        """Restore what this path has changed in the runner; called however ``sample`` ends."""


class PerItemPath(SamplingPath):
    """Keeps one episode object for each lane in ``_ongoing_episodes``, as RLlib's runners do.

    Args:
        runner: The runner that samples.
    """

    def __init__(self, runner: "SlotRunner") -> None:
        self._runner = runner

    def act_on(self, idle: Sequence[SlotState]) -> None:
        """See ``SamplingPath``."""
        for state in idle:
            if self._runner._call.budget.is_open:
                self._act(state)

    @abc.abstractmethod
    def _act(self, state: SlotState) -> None:
        """Choose and send actions for a slot's lanes."""

    @abc.abstractmethod
    def _truncate(self, lane: int, cause: Exception | str) -> Any | None:
        """End a lane's running episode; return it unless all its steps were returned before."""

    @abc.abstractmethod
    def _end(self, lane: int) -> Any:
        """Return a lane's episode, which is done, and put a new one in its place."""

    def _timestep(self, episode: Any) -> int:
        """Return how many environment steps an episode has had, earlier chunks included."""
        return int(episode.t)

    def _converted(self, episode: Any) -> Any:
        """Return an episode in the form in which it is returned."""
        return episode.to_numpy() if self._runner.episodes_to_numpy else episode

    # --- from observations to actions -----------------------------------------------------

    def prepare(self, state: SlotState, batched: dict[str, Any], ended: Sequence[Any] = ()) -> None:
        """Run the env-to-module connectors; their output is the next forward pass's input.

        Args:
            state: The slot.
            batched: What has arrived, as RLlib hands it to connectors; one item a lane.
            ended: Episodes that ended with this step and are not among the running ones any more:
                what connectors write into episodes must be in their last step, too.
        """
        runner = self._runner
        if runner.module is None:
            return
        common = {
            "explore": runner._call.explore,
            "rl_module": runner.module,
            "shared_data": state.shared_data,
            **batched,
        }
        if ended:
            runner._env_to_module(episodes=ended, batch={}, metrics=None, **common)
        state.to_module = runner._env_to_module(
            episodes=self._episodes_of(state),
            batch={},
            metrics=runner.metrics,
            metrics_prefix_key=(ENV_TO_MODULE_CONNECTOR,),
            **common,
        )

    def _choose(self, state: SlotState, sampled: int) -> dict[str, Any]:
        """Run the module and the module-to-env connectors.

        Args:
            state: The slot.
            sampled: Environment steps of this call of ``sample`` so far.
        """
        runner = self._runner
        to_module, state.to_module = state.to_module, None
        chosen: dict[str, Any] = runner._module_to_env(
            rl_module=runner.module,
            batch=self._forward(to_module, sampled),
            episodes=self._episodes_of(state),
            explore=runner._call.explore,
            shared_data=state.shared_data,
            metrics=runner.metrics,
            metrics_prefix_key=(MODULE_TO_ENV_CONNECTOR,),
        )
        return chosen

    def _forward(self, to_module: Any, sampled: int) -> Any:
        runner = self._runner
        with runner.metrics.log_time(RLMODULE_INFERENCE_TIMER):
            if not runner._call.explore:
                return self._run(runner.module.forward_inference, to_module)
            num_runners = runner.config.num_env_runners or 1
            per_runner = runner.num_env_steps_sampled_lifetime // num_runners
            t = (per_runner + sampled) * num_runners
            return self._run(partial(runner.module.forward_exploration, t=t), to_module)

    def _run(self, in_torch: Callable[[Any], Any], to_module: Any) -> Any:
        """Run the module; ``in_torch`` is its method."""
        return in_torch(to_module)

    def _step(self, state: SlotState, actions: Any, num_timesteps: int) -> None:
        """Send actions, which are to bring ``num_timesteps``."""
        runner = self._runner
        state.num_in_flight = num_timesteps
        runner._call.budget.in_flight += num_timesteps
        state.slot.step(actions)
        runner._log_env_steps(runner._metrics_num_try_env_step, 1)

    # --- from results to episodes ---------------------------------------------------------

    def _episodes_of(self, state: SlotState) -> list[Any]:
        lanes = state.slot.lanes
        episodes: list[Any] = self._runner._ongoing_episodes[lanes.start : lanes.stop]
        return episodes

    def _call_back(self, which: str, lane: int) -> None:
        self._runner._make_on_episode_callback(which, lane, self._runner._ongoing_episodes)

    def _start(self, lanes: Iterable[int]) -> None:
        """Call the callbacks after a reset."""
        for lane in lanes:
            self._call_back("on_episode_start", lane)

    def _advance(self, lanes: Iterable[int], started: Collection[int]) -> list[tuple[int, Any]]:
        """Call the callbacks after a step; return the lanes and episodes that ended with it.

        Args:
            lanes: The lanes that were stepped or began a new episode.
            started: Those of them that began a new episode.
        """
        ended = []
        budget = self._runner._call.budget
        for lane in lanes:
            self._call_back("on_episode_start" if lane in started else "on_episode_step", lane)
            if self._runner._ongoing_episodes[lane].is_done:
                budget.episodes += 1
                ended.append((lane, self._end(lane)))
                if budget.num_episodes is not None and budget.is_full:
                    break
        return ended

    def interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        """See ``SamplingPath``; lanes whose episodes have not begun keep them."""
        is_begun = [self._runner._ongoing_episodes[lane].is_reset for lane in slot.lanes]
        for lane in itertools.compress(slot.lanes, is_begun):
            self._interrupt_lane(lane, cause)
        return sum(is_begun)

    def _interrupt_lane(self, lane: int, cause: Exception | str) -> None:
        """Truncate a lane's running episode."""
        runner = self._runner
        episode = runner._ongoing_episodes[lane]
        returned = self._truncate(lane, cause)
        runner._ongoing_episodes_for_metrics.pop(episode.id_, None)
        if returned is not None:
            runner._call.interrupted.append(returned)

    def conclude(self, *, continues: bool) -> list[Any]:
        """See ``SamplingPath``."""
        chunks: list[Any] = []
        if not continues:
            return chunks
        runner = self._runner
        lookback = runner.config.episode_lookback_horizon
        for lane, episode in enumerate(runner._ongoing_episodes):
            t = self._timestep(episode)
            if len(episode) == 0 and t:
                continue  # not stepped in this call
            runner._ongoing_episodes[lane] = episode.cut(len_lookback_buffer=lookback)
            if t == 0:
                continue  # just begun: it has no step yet
            episode.validate()
            runner._ongoing_episodes_for_metrics[episode.id_].append(episode)
            chunks.append(self._converted(episode))
        return chunks
