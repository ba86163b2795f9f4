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
from rlmesh_ray.rllib.array_obstacle import obstacle
from rlmesh_ray.rllib.array_pipeline import ArrayPipeline, Choice
from rlmesh_ray.rllib.cut_short import cut_short
from rlmesh_ray.rllib.lane_episodes import LaneEpisodes
from rlmesh_ray.rllib.lane_group import GroupBatch
from rlmesh_ray.rllib.lane_record import Ended, LaneRecord
from rlmesh_ray.rllib.lane_slot import LaneSlot, Phase
from rlmesh_ray.rllib.runner_lanes import Lanes

_LOG = logging.getLogger(__name__)

LANES_AS_ARRAYS = "lanes_as_arrays"
"""Metric: 1.0 where a runner's lanes are treated as arrays, 0.0 where one by one."""


class ArrayEpisodes(LaneEpisodes):
    """Does between two steps what ``LaneEpisodes`` does, without looking at single lanes.

    Episodes are made while nothing has arrived, and at the end of ``sample``. When there is an
    ``obstacle``, it is as if this class were not there. That is looked at in each call of
    ``sample``, and the module's output in each step; arrays begin with new episodes only. What it
    comes to is logged when it changes, and counted in each call (``LANES_AS_ARRAYS``).
    """

    why_one_by_one: str | None = "nothing has been sampled yet"
    """Why lanes are treated one by one, as RLlib's own runner does; None: they are arrays."""
    _pipeline: ArrayPipeline | None = None
    _records: dict[LaneSlot, LaneRecord]
    _over: list[Ended]
    _chunks: list[SingleAgentEpisode]
    _num_sent: int

    def _sample(
        self, *, explore: bool, random_actions: bool = False, **kwargs: Any
    ) -> list[SingleAgentEpisode]:
        self._over, self._chunks, self._num_sent = [], [], 0
        if self._pipeline is not None:
            why_not = self._why_not(random_actions=random_actions)
            if why_not:
                self._explore = explore
                self._leave_arrays(why_not)
            else:
                self._pipeline = ArrayPipeline(self, explore=explore)
        is_training = getattr(self.module, "training", False)
        try:
            return super()._sample(explore=explore, random_actions=random_actions, **kwargs)
        finally:
            if is_training and not self.module.training:
                self.module.train()  # as RLlib's forward pass leaves it; see BareForward
            if self._num_sent:
                self._log_env_steps(self._metrics_num_try_env_step, self._num_sent)

    def _why_not(self, *, random_actions: bool) -> str | None:
        return "actions are drawn at random" if random_actions else obstacle(self)

    def _leave_arrays(self, why: str) -> None:
        """Go on lane by lane with the episodes that are running."""
        flattener = None if self._pipeline is None else self._pipeline.flattener
        self._pipeline = None
        self._tell(why)
        for lanes in self._lanes:
            record = self._records.pop(lanes.slot, None)
            if record is None:
                continue
            over = record.is_over.tolist()
            ended, running = record.hand_over()
            self._over += ended
            self._take_interrupted(record)
            self._ongoing_episodes[lanes.slot.lanes.start : lanes.slot.lanes.stop] = running
            if lanes.slot.phase is Phase.STEPPING:  # what arrives will be taken lane by lane
                columns = dict(lanes.extras or {})
                del columns[WEIGHTS_SEQ_NO]
                lanes.actions, lanes.extras = columns.pop(Columns.ACTIONS), columns
            with self._without(flattener):
                self._prepare(lanes, {})
            for lane, is_over in zip(lanes.slot.lanes, over, strict=True):
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

    def _tell(self, why_one_by_one: str | None) -> None:
        """Log how lanes are treated, if that has changed."""
        if why_one_by_one == self.why_one_by_one:
            return
        self.why_one_by_one = why_one_by_one
        how = f"one by one, since {why_one_by_one}" if why_one_by_one else "as arrays"
        _LOG.info("worker %s: lanes are treated %s", self.worker_index, how)

    def _reset_envs(self, *arguments: Any, **kwargs: Any) -> None:
        why_not = self._why_not(random_actions=self._random_actions)
        self._tell(why_not)
        self._pipeline = None if why_not else ArrayPipeline(self, explore=self._explore)
        self._records = {}
        super()._reset_envs(*arguments, **kwargs)

    def _act(self, lanes: Lanes) -> None:
        pipeline = self._pipeline
        if pipeline is None:
            super()._act(lanes)
            return
        self._take_up(lanes, pipeline.choose(lanes.to_module, self._quota.timesteps))

    def _act_on(self, idle: Sequence[Lanes]) -> None:
        """Choose for several slots in one forward pass, which costs little more than for one.

        For half of all slots at most: while these are chosen for, the others' environments work.
        """
        most = len(self._lanes) // 2
        while idle and self._pipeline is not None and most > 1:
            together, idle = self._within_quota(idle[:most]), idle[most:]
            if len(together) > 1:
                self._act_together(self._pipeline, together)
            else:
                super()._act_on(together)
        super()._act_on(idle)

    def _within_quota(self, idle: Sequence[Lanes]) -> list[Lanes]:
        """Return those of ``idle`` that are asked as long as the quota is open."""
        taken: list[Lanes] = []
        asked = self._quota.asked
        for lanes in idle:
            if not self._quota.is_open:
                break
            self._quota.asked += self._num_running(lanes)
            taken.append(lanes)
        self._quota.asked = asked
        return taken

    def _act_together(self, pipeline: ArrayPipeline, idle: Sequence[Lanes]) -> None:
        inputs = pipeline.joined([lanes.to_module for lanes in idle])
        chosen = pipeline.choose(inputs, self._quota.timesteps)
        choices = chosen.split([len(lanes.slot.lanes) for lanes in idle])
        for number, lanes in enumerate(idle):
            if choices is None or self._pipeline is None:
                self._act(lanes)
            else:
                self._take_up(lanes, choices[number])

    def _num_running(self, lanes: Lanes) -> int:
        """Return how many timesteps a step brings: a lane that has ended starts anew instead."""
        return len(lanes.slot.lanes) - self._records[lanes.slot].num_over

    def _take_up(self, lanes: Lanes, chosen: Choice) -> None:
        """Send what has been chosen for a slot, and keep it for the episodes."""
        record = self._records[lanes.slot]
        columns = self._columns_of(chosen)
        if not record.takes(columns):
            self._leave_arrays("the module gives other things than arrays that stay alike")
            own = {
                Columns.ACTIONS: chosen.actions,
                Columns.ACTIONS_FOR_ENV: chosen.actions_for_env,
                **{name: unbatch(column) for name, column in chosen.extras.items()},
            }
            self._send(lanes, own)
            return
        lanes.extras = columns
        lanes.num_asked = self._num_running(lanes)
        self._quota.asked += lanes.num_asked
        lanes.slot.step(chosen.actions_for_env)
        self._num_sent += 1

    def _columns_of(self, chosen: Choice) -> dict[str, Any]:
        """Return what is kept of a step besides what the environment gives."""
        return {
            Columns.ACTIONS: chosen.actions,
            **chosen.extras,
            WEIGHTS_SEQ_NO: _filled(len(chosen.actions), self._weights_seq_no),
        }

    def _add_resets(self, lanes: Lanes, arrived: GroupBatch) -> None:
        if self._pipeline is None:
            super()._add_resets(lanes, arrived)
            return
        observation = self._pipeline.kept(arrived.observation)
        self._records[lanes.slot] = LaneRecord(
            observation,
            arrived.infos,
            lookback=self.config.episode_lookback_horizon,
            observation_space=self._pipeline.observation_space,
            action_space=self.env.single_action_space,
        )
        lanes.to_module = self._pipeline.to_module(observation)

    def _add_steps(self, lanes: Lanes, arrived: GroupBatch) -> None:
        if self._pipeline is None:
            super()._add_steps(lanes, arrived)
            return
        assert lanes.extras is not None, "what _act has left there"
        record = self._records[lanes.slot]
        discarded = arrived.discarded
        num_lost = sum(not record.is_over[lane] for lane in discarded)
        self._quota.timesteps += self._num_running(lanes) - num_lost
        observation = self._pipeline.kept(arrived.observation)
        record.add(
            observation,
            arrived.rewards,
            arrived.terminated,
            arrived.truncated,
            arrived.infos,
            lanes.extras,
            discarded,
        )
        self._quota.episodes += record.num_over - len(discarded)
        lanes.to_module = self._pipeline.to_module(observation)

    def _work_ahead(self) -> bool:
        return any(record.make_one() for record in self._records.values())

    def _settle(self) -> None:
        if self._pipeline is not None:
            with _collector_at_rest():
                for record in self._records.values():
                    ended, chunks = record.cut()
                    self._over += ended
                    self._chunks += chunks
                    self._take_interrupted(record)
        self._over.sort(key=lambda ended: ended.at_s)
        earlier = [ended.episode for ended in self._over]
        self._returned = [*earlier, *self._returned][: self._quota.num_episodes]

    def _cut_ongoing(self) -> list[SingleAgentEpisode]:
        if self._pipeline is None:
            return super()._cut_ongoing()
        for chunk in self._chunks:
            self._ongoing_episodes_for_metrics[chunk.id_].append(chunk)
        return self._chunks

    def _log_sampled(self) -> None:
        super()._log_sampled()
        self.metrics.log_value(LANES_AS_ARRAYS, float(self._pipeline is not None), window=1)

    def _take_interrupted(self, record: LaneRecord) -> None:
        for episode_id, episode in record.take_interrupted().items():
            self._ongoing_episodes_for_metrics.pop(episode_id, None)
            if episode is not None:
                self._interrupted.append(episode)

    def _interrupt(self, slot: LaneSlot, cause: RlmeshError) -> int:
        if self._pipeline is None:
            return super()._interrupt(slot, cause)
        record = self._records.pop(slot, None)
        if record is None:
            return 0  # it has not come to anything
        ended, chunks = record.cut()
        self._over += ended
        self._take_interrupted(record)
        for chunk in chunks:
            cut_short(chunk, cause)
        self._interrupted += chunks
        for episode_id in record.running_ids:
            self._ongoing_episodes_for_metrics.pop(episode_id, None)
        return len(record.running_ids)


@lru_cache(maxsize=16)
def _filled(count: int, number: int) -> NDArray[np.int64]:
    """Return an array of equal numbers, to be read only."""
    return np.full(count, number)


@contextlib.contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Make many objects that all stay, without a look at all there are after every few hundred."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
