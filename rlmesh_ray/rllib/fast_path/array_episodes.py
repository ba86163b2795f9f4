"""The episodes of a runner that treats all lanes of a slot as arrays, where that is the same."""

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import unbatch

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.fast_path.array_pipeline import ActionBatch, ArrayPipeline
from rlmesh_ray.rllib.fast_path.eligibility import ineligibility
from rlmesh_ray.rllib.fast_path.episode_buffer import EndedEpisode, EpisodeBuffer
from rlmesh_ray.rllib.runner.session_group import GroupBatch
from rlmesh_ray.rllib.runner.single_agent_episodes import SingleAgentEpisodes
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate

_LOG = logging.getLogger(__name__)

LANES_AS_ARRAYS = "lanes_as_arrays"
"""Metric: 1.0 where a runner's lanes are treated as arrays, 0.0 where one by one."""


class ArrayEpisodes(SingleAgentEpisodes):
    """Does between two steps what ``SingleAgentEpisodes`` does, without looking at single lanes.

    Episodes are made while nothing has arrived, and at the end of ``sample``. When there is an
    ``ineligibility``, it is as if this class were not there. That is looked at in each call of
    ``sample``, and the module's output in each step; arrays begin with new episodes only. What it
    comes to is logged when it changes, and counted in each call (``LANES_AS_ARRAYS``).
    """

    fast_path_disabled_reason: str | None = "nothing has been sampled yet"
    """Why lanes are treated one by one, as RLlib's own runner does; None: they are arrays."""
    _pipeline: ArrayPipeline | None = None
    _buffers: dict[Slot, EpisodeBuffer]
    _ended_episodes: list[EndedEpisode]
    _chunks: list[SingleAgentEpisode]
    _num_sent: int

    def _sample(
        self, *, explore: bool, random_actions: bool = False, **kwargs: Any
    ) -> list[SingleAgentEpisode]:
        self._ended_episodes, self._chunks, self._num_sent = [], [], 0
        if self._pipeline is not None:
            reason = self._ineligibility(random_actions=random_actions)
            if reason:
                self._explore = explore
                self._leave_fast_path(reason)
            else:
                self._pipeline = ArrayPipeline(self, explore=explore)
        is_training = getattr(self.module, "training", False)
        try:
            return super()._sample(explore=explore, random_actions=random_actions, **kwargs)
        finally:
            if is_training and not self.module.training:
                self.module.train()  # as RLlib's forward pass leaves it; see FastForward
            if self._num_sent:
                self._log_env_steps(self._metrics_num_try_env_step, self._num_sent)

    def _ineligibility(self, *, random_actions: bool) -> str | None:
        return "actions are drawn at random" if random_actions else ineligibility(self)

    def _leave_fast_path(self, why: str) -> None:
        """Go on lane by lane with the episodes that are running."""
        flattener = None if self._pipeline is None else self._pipeline.flattener
        self._pipeline = None
        self._log_mode(why)
        for state in self._slots:
            buffer = self._buffers.pop(state.slot, None)
            if buffer is None:
                continue
            over = buffer.is_over.tolist()
            ended, running = buffer.hand_over()
            self._ended_episodes += ended
            self._take_interrupted(buffer)
            self._ongoing_episodes[state.slot.lanes.start : state.slot.lanes.stop] = running
            if state.slot.phase is SlotPhase.STEPPING:  # what arrives will be taken lane by lane
                columns = dict(state.extras or {})
                del columns[WEIGHTS_SEQ_NO]
                state.actions, state.extras = columns.pop(Columns.ACTIONS), columns
            with self._without(flattener):
                self._prepare(state, {})
            for lane, is_over in zip(state.slot.lanes, over, strict=True):
                if is_over:
                    self._new_episode(lane, self._ongoing_episodes)

    @contextlib.contextmanager
    def _without(self, flattener: ConnectorV2 | None) -> Iterator[None]:
        """Leave out the connector that the observations of a record have passed already."""
        if flattener is None:
            yield
            return
        connectors = self._env_to_module.connectors
        self._env_to_module.connectors = [one for one in connectors if one is not flattener]
        try:
            yield
        finally:
            self._env_to_module.connectors = connectors

    def _log_mode(self, fast_path_disabled_reason: str | None) -> None:
        """Log how lanes are treated, if that has changed."""
        if fast_path_disabled_reason == self.fast_path_disabled_reason:
            return
        self.fast_path_disabled_reason = fast_path_disabled_reason
        how = (
            f"one by one, since {fast_path_disabled_reason}"
            if fast_path_disabled_reason
            else "as arrays"
        )
        _LOG.info("worker %s: lanes are treated %s", self.worker_index, how)

    def _reset_envs(self, *arguments: Any, **kwargs: Any) -> None:
        reason = self._ineligibility(random_actions=self._random_actions)
        self._log_mode(reason)
        self._pipeline = None if reason else ArrayPipeline(self, explore=self._explore)
        self._buffers = {}
        super()._reset_envs(*arguments, **kwargs)

    def _act(self, state: SlotState) -> None:
        pipeline = self._pipeline
        if pipeline is None:
            super()._act(state)
            return
        self._take_up(state, pipeline.choose(state.to_module, self._budget.timesteps))

    def _act_on(self, idle: Sequence[SlotState]) -> None:
        """Choose for several slots in one forward pass, which costs little more than for one.

        For half of all slots at most: while these are chosen for, the others' environments work.
        """
        most = len(self._slots) // 2
        while idle and self._pipeline is not None and most > 1:
            together, idle = self._within_budget(idle[:most]), idle[most:]
            if len(together) > 1:
                self._act_together(self._pipeline, together)
            else:
                super()._act_on(together)
        super()._act_on(idle)

    def _within_budget(self, idle: Sequence[SlotState]) -> list[SlotState]:
        """Return those of ``idle`` that are asked as long as the quota is open."""
        taken: list[SlotState] = []
        asked = self._budget.in_flight
        for state in idle:
            if not self._budget.is_open:
                break
            self._budget.in_flight += self._num_running(state)
            taken.append(state)
        self._budget.in_flight = asked
        return taken

    def _act_together(self, pipeline: ArrayPipeline, idle: Sequence[SlotState]) -> None:
        inputs = pipeline.joined([state.to_module for state in idle])
        chosen = pipeline.choose(inputs, self._budget.timesteps)
        choices = chosen.split([len(state.slot.lanes) for state in idle])
        for number, state in enumerate(idle):
            if choices is None or self._pipeline is None:
                self._act(state)
            else:
                self._take_up(state, choices[number])

    def _num_running(self, state: SlotState) -> int:
        """Return how many timesteps a step brings: a lane that has ended starts anew instead."""
        return len(state.slot.lanes) - self._buffers[state.slot].num_over

    def _take_up(self, state: SlotState, chosen: ActionBatch) -> None:
        """Send what has been chosen for a slot, and keep it for the episodes."""
        buffer = self._buffers[state.slot]
        columns = self._columns_of(chosen)
        if not buffer.takes(columns):
            self._leave_fast_path("the module gives other things than arrays that stay alike")
            own = {
                Columns.ACTIONS: chosen.actions,
                Columns.ACTIONS_FOR_ENV: chosen.actions_for_env,
                **{name: unbatch(column) for name, column in chosen.extras.items()},
            }
            self._send(state, own)
            return
        state.extras = columns
        state.num_in_flight = self._num_running(state)
        self._budget.in_flight += state.num_in_flight
        state.slot.step(chosen.actions_for_env)
        self._num_sent += 1

    def _columns_of(self, chosen: ActionBatch) -> dict[str, Any]:
        """Return what is kept of a step besides what the environment gives."""
        return {
            Columns.ACTIONS: chosen.actions,
            **chosen.extras,
            WEIGHTS_SEQ_NO: _filled(len(chosen.actions), self._weights_seq_no),
        }

    def _add_resets(self, state: SlotState, arrived: GroupBatch) -> None:
        if self._pipeline is None:
            super()._add_resets(state, arrived)
            return
        observation = self._pipeline.kept(arrived.observation)
        self._buffers[state.slot] = EpisodeBuffer(
            observation,
            arrived.infos,
            lookback=self.config.episode_lookback_horizon,
            observation_space=self._pipeline.observation_space,
            action_space=self.env.single_action_space,
        )
        state.to_module = self._pipeline.to_module(observation)

    def _add_steps(self, state: SlotState, arrived: GroupBatch) -> None:
        if self._pipeline is None:
            super()._add_steps(state, arrived)
            return
        assert state.extras is not None, "what _act has left there"
        buffer = self._buffers[state.slot]
        discarded = arrived.discarded
        num_lost = sum(not buffer.is_over[lane] for lane in discarded)
        self._budget.timesteps += self._num_running(state) - num_lost
        observation = self._pipeline.kept(arrived.observation)
        buffer.add(
            observation,
            arrived.rewards,
            arrived.terminated,
            arrived.truncated,
            arrived.infos,
            state.extras,
            discarded,
        )
        self._budget.episodes += buffer.num_over - len(discarded)
        state.to_module = self._pipeline.to_module(observation)

    def _work_ahead(self) -> bool:
        return any(buffer.make_one() for buffer in self._buffers.values())

    def _settle(self) -> None:
        if self._pipeline is not None:
            with _gc_paused():
                for buffer in self._buffers.values():
                    ended, chunks = buffer.cut()
                    self._ended_episodes += ended
                    self._chunks += chunks
                    self._take_interrupted(buffer)
        self._ended_episodes.sort(key=lambda ended: ended.at_s)
        earlier = [ended.episode for ended in self._ended_episodes]
        self._returned = [*earlier, *self._returned][: self._budget.num_episodes]

    def _cut_ongoing(self) -> list[SingleAgentEpisode]:
        if self._pipeline is None:
            return super()._cut_ongoing()
        for chunk in self._chunks:
            self._ongoing_episodes_for_metrics[chunk.id_].append(chunk)
        return self._chunks

    def _log_sampled(self) -> None:
        super()._log_sampled()
        self.metrics.log_value(LANES_AS_ARRAYS, float(self._pipeline is not None), window=1)

    def _take_interrupted(self, buffer: EpisodeBuffer) -> None:
        for episode_id, episode in buffer.take_interrupted().items():
            self._ongoing_episodes_for_metrics.pop(episode_id, None)
            if episode is not None:
                self._interrupted.append(episode)

    def _interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        if self._pipeline is None:
            return super()._interrupt(slot, cause)
        buffer = self._buffers.pop(slot, None)
        if buffer is None:
            return 0  # it has not come to anything
        ended, chunks = buffer.cut()
        self._ended_episodes += ended
        self._take_interrupted(buffer)
        for chunk in chunks:
            truncate(chunk, cause)
        self._interrupted += chunks
        for episode_id in buffer.running_ids:
            self._ongoing_episodes_for_metrics.pop(episode_id, None)
        return len(buffer.running_ids)


@lru_cache(maxsize=16)
def _filled(count: int, number: int) -> NDArray[np.int64]:
    """Return an array of equal numbers, to be read only."""
    return np.full(count, number)


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Make many objects that all stay, without a look at all there are after every few hundred."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
