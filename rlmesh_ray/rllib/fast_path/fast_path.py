"""The fast path of a runner: all lanes of a slot are processed as arrays."""

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import unbatch

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.fast_path.array_pipeline import ActionBatch, ArrayPipeline
from rlmesh_ray.rllib.fast_path.episode_buffer import EndedEpisode, EpisodeBuffer
from rlmesh_ray.rllib.runner.sampling_path import SamplingPath
from rlmesh_ray.rllib.runner.session_group import GroupBatch
from rlmesh_ray.rllib.runner.single_agent_path import SingleAgentPath
from rlmesh_ray.rllib.runner.slot import Slot, SlotPhase
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.env_runner import RLMeshEnvRunner


class FastPath(SamplingPath):
    """Does what ``SingleAgentPath`` does, with the same episodes, without a loop over lanes.

    Episodes are built while no result has arrived, and at the end of ``sample``. Where it cannot
    continue, ``SingleAgentPath`` takes over in the middle of the running episodes.

    Args:
        runner: A runner without an ``ineligibility``, in a call of ``sample`` that resets it.
    """

    def __init__(self, runner: "RLMeshEnvRunner") -> None:
        self._runner = runner
        self._buffers: dict[Slot, EpisodeBuffer] = {}
        self._ended: list[EndedEpisode] = []
        self._begin_call()

    def _begin_call(self) -> None:
        self._pipeline = ArrayPipeline(self._runner, explore=self._runner._call.explore)
        self._was_training = getattr(self._runner.module, "training", False)
        self._num_sent = 0

    def resume(self) -> None:
        """See ``SamplingPath``."""
        reason = self._runner._fast_path_ineligibility()
        if reason:
            self._leave(reason)
        else:
            self._begin_call()

    # --- from observations to actions -----------------------------------------------------

    def act_on(self, idle: Sequence[SlotState]) -> None:
        """Choose for several slots in one forward pass, which costs little more than for one.

        It is for half of all slots at most, so that the environments of the others work meanwhile.
        """
        most = max(len(self._runner._slots) // 2, 1)
        for first in range(0, len(idle), most):
            together = self._within_budget(idle[first : first + most])
            if not together:
                return
            for number, chosen in enumerate(self._choose(together)):
                if not self._send(together[number], chosen):
                    self._runner._path.act_on([*together[number + 1 :], *idle[first + most :]])
                    return

    def _within_budget(self, idle: Sequence[SlotState]) -> list[SlotState]:
        """Return the first of ``idle``, as many as the budget has room for."""
        taken: list[SlotState] = []
        budget = self._runner._call.budget
        in_flight = budget.in_flight
        for state in idle:
            if not budget.is_open:
                break
            state.num_in_flight = self._num_running(state)
            budget.in_flight += state.num_in_flight
            taken.append(state)
        budget.in_flight = in_flight
        return taken

    def _choose(self, together: Sequence[SlotState]) -> Iterable[ActionBatch]:
        """Return the actions for each of these slots, at least one."""
        pipeline, sampled = self._pipeline, self._runner._call.budget.timesteps
        if len(together) == 1:
            return (pipeline.choose(together[0].to_module, sampled),)
        joined = np.concatenate([state.to_module for state in together])
        batches = pipeline.choose(joined, sampled).split([len(s.slot.lanes) for s in together])
        return batches or (pipeline.choose(state.to_module, sampled) for state in together)

    def _num_running(self, state: SlotState) -> int:
        """Return how many timesteps a step brings: a lane that has ended starts anew instead."""
        return len(state.slot.lanes) - self._buffers[state.slot].num_over

    def _send(self, state: SlotState, chosen: ActionBatch) -> bool:
        """Send the actions for a slot, and keep them for the episodes.

        Returns:
            Whether the fast path continues: the module's output must be arrays whose kind stays.
        """
        columns = {
            Columns.ACTIONS: chosen.actions,
            **chosen.extras,
            WEIGHTS_SEQ_NO: _filled(len(chosen.actions), self._runner._weights_seq_no),
        }
        if not self._buffers[state.slot].takes(columns):
            path = self._leave("the module's output is not arrays of unchanging dtype and shape")
            to_env = {
                Columns.ACTIONS: chosen.actions,
                Columns.ACTIONS_FOR_ENV: chosen.actions_for_env,
                **{name: unbatch(column) for name, column in chosen.extras.items()},
            }
            path.send(state, to_env)
            return False
        state.extras = columns
        self._runner._call.budget.in_flight += state.num_in_flight
        state.slot.step(chosen.actions_for_env)
        self._num_sent += 1
        return True

    # --- from results to episodes ---------------------------------------------------------

    def add_resets(self, state: SlotState, batch: GroupBatch) -> None:
        """See ``SamplingPath``."""
        observation = self._pipeline.flattened(batch.observation)
        self._buffers[state.slot] = EpisodeBuffer(
            observation,
            batch.infos,
            lookback=self._runner.config.episode_lookback_horizon,
            observation_space=self._pipeline.observation_space,
            action_space=self._runner.env.single_action_space,
        )
        state.to_module = observation

    def add_steps(self, state: SlotState, batch: GroupBatch) -> None:
        """See ``SamplingPath``."""
        assert state.extras is not None, "what _send has left there"
        buffer, budget = self._buffers[state.slot], self._runner._call.budget
        discarded = batch.discarded
        num_lost = sum(not buffer.is_over[lane] for lane in discarded)
        budget.timesteps += self._num_running(state) - num_lost
        observation = self._pipeline.flattened(batch.observation)
        buffer.add(
            observation,
            batch.rewards,
            batch.terminated,
            batch.truncated,
            batch.infos,
            state.extras,
            discarded,
        )
        budget.episodes += buffer.num_over - len(discarded)
        state.to_module = observation

    def interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        """See ``SamplingPath``."""
        buffer = self._buffers.pop(slot, None)
        if buffer is None:
            return 0  # its episodes have not begun
        chunks = self._cut(buffer)
        for chunk in chunks:
            truncate(chunk, cause)
        self._runner._call.interrupted += chunks
        for episode_id in buffer.running_ids:
            self._runner._ongoing_episodes_for_metrics.pop(episode_id, None)
        return len(buffer.running_ids)

    def work_ahead(self) -> bool:
        """See ``SamplingPath``."""
        return any(buffer.make_one() for buffer in self._buffers.values())

    def conclude(self, *, continues: bool) -> list[SingleAgentEpisode]:
        """See ``SamplingPath``."""
        chunks: list[SingleAgentEpisode] = []
        with _gc_paused():
            for buffer in self._buffers.values():
                chunks += self._cut(buffer)
        self._return_ended()
        if not continues:
            return []
        for chunk in chunks:
            self._runner._ongoing_episodes_for_metrics[chunk.id_].append(chunk)
        return chunks

    def _cut(self, buffer: EpisodeBuffer) -> list[SingleAgentEpisode]:
        """Take the episodes that have ended out of a buffer; return chunks of the running ones."""
        ended, chunks = buffer.cut()
        self._ended += ended
        self._take_interrupted(buffer)
        return chunks

    def _take_interrupted(self, buffer: EpisodeBuffer) -> None:
        for episode_id, episode in buffer.take_interrupted().items():
            self._runner._ongoing_episodes_for_metrics.pop(episode_id, None)
            if episode is not None:
                self._runner._call.interrupted.append(episode)

    def _return_ended(self) -> None:
        """Return the episodes that have ended, in the order of their ends."""
        self._ended.sort(key=lambda ended: ended.at_s)
        call = self._runner._call
        call.returned += [ended.episode for ended in self._ended][: call.budget.num_episodes]
        self._ended = []

    # --- back to RLlib's per-item path ----------------------------------------------------

    def _leave(self, reason: str) -> SingleAgentPath:
        """Continue the running episodes on RLlib's per-item path, and return that."""
        runner = self._runner
        path = SingleAgentPath(runner)
        runner._take_path(path, reason)
        self.finish()
        for state in runner._slots:
            buffer = self._buffers.pop(state.slot, None)
            if buffer is not None:
                self._hand_over(state, buffer, path)
        self._return_ended()
        return path

    def _hand_over(self, state: SlotState, buffer: EpisodeBuffer, path: SingleAgentPath) -> None:
        runner, lanes = self._runner, state.slot.lanes
        over = buffer.is_over.tolist()
        ended, running = buffer.hand_over()
        self._ended += ended
        self._take_interrupted(buffer)
        runner._ongoing_episodes[lanes.start : lanes.stop] = running
        if state.slot.phase is SlotPhase.STEPPING:  # path.add_steps will take its result
            columns = dict(state.extras or {})
            del columns[WEIGHTS_SEQ_NO]
            state.actions, state.extras = columns.pop(Columns.ACTIONS), columns
        with self._without_flattener():
            path.prepare(state, {})
        for lane, is_over in zip(lanes, over, strict=True):
            if is_over:
                runner._new_episode(lane, runner._ongoing_episodes)

    @contextlib.contextmanager
    def _without_flattener(self) -> Iterator[None]:
        """Leave out the connector that a buffer's observations have passed already, if any."""
        pipeline = self._runner._env_to_module
        connectors = pipeline.connectors
        pipeline.connectors = [one for one in connectors if one is not self._pipeline.flattener]
        try:
            yield
        finally:
            pipeline.connectors = connectors

    def finish(self) -> None:
        """See ``SamplingPath``."""
        runner = self._runner
        if self._was_training and not runner.module.training:
            runner.module.train()  # as RLlib's forward pass leaves it; see FastForward
        self._was_training = False
        if self._num_sent:
            runner._log_env_steps(runner._metrics_num_try_env_step, self._num_sent)
            self._num_sent = 0


@lru_cache(maxsize=16)
def _filled(count: int, number: int) -> NDArray[np.int64]:
    """Return an array of equal numbers, to be read only."""
    return np.full(count, number)


@contextlib.contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection while many objects are made, all of which stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
