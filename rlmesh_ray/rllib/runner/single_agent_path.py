"""RLlib's per-item path for lanes with one agent each."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import batch, unbatch

from rlmesh_ray.rllib.runner.sampling_path import PerItemPath
from rlmesh_ray.rllib.runner.session_group import GroupBatch
from rlmesh_ray.rllib.runner.slot import Slot
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate


class SingleAgentPath(PerItemPath):
    """Does what RLlib's SingleAgentEnvRunner does between two steps, for the lanes of one slot."""

    def _act(self, state: SlotState) -> None:
        call = self._runner._call
        if call.random_actions:
            self.send(state, {Columns.ACTIONS: self._random(state.slot)})
        else:
            self.send(state, self._choose(state, call.budget.timesteps))

    def send(self, state: SlotState, to_env: dict[str, Any]) -> None:
        """Send what the connectors have made of the module's output; one item a lane."""
        state.actions = to_env.pop(Columns.ACTIONS)
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, state.actions)
        state.extras = to_env
        # A lane that has ended is not stepped but starts anew.
        num_timesteps = sum(episode.is_reset for episode in self._episodes_of(state))
        self._step(state, actions_for_env, num_timesteps)

    def _run(self, in_torch: Callable[[Any], Any], to_module: Any) -> Any:
        """Run the module in torch or compiled."""
        explore = self._runner._call.explore
        choice = self._runner._inference_choice(explore=explore, draws=False)
        return choice.run(in_torch, to_module)

    def _random(self, slot: Slot) -> Any:
        actions = self._runner.env.action_space.sample()
        if len(slot.lanes) == self._runner.num_envs:
            return actions
        return batch(unbatch(actions)[slot.lanes.start : slot.lanes.stop])

    def add_resets(self, state: SlotState, batch: GroupBatch) -> None:
        """See ``SamplingPath``."""
        observations, infos = unbatch(batch.observation), list(batch.infos)
        episodes = self._episodes_of(state)
        for episode, observation, lane_info in zip(episodes, observations, infos, strict=True):
            episode.add_env_reset(observation=observation, infos=lane_info)
        self.prepare(state, {Columns.OBS: observations, Columns.INFOS: infos})
        self._start(state.slot.lanes)

    def add_steps(self, state: SlotState, batch: GroupBatch) -> None:
        """See ``SamplingPath``."""
        runner, call = self._runner, self._runner._call
        observations, infos = unbatch(batch.observation), list(batch.infos)
        discarded = {state.slot.lanes[row]: cause for row, cause in batch.discarded.items()}
        for lane, cause in discarded.items():
            if runner._ongoing_episodes[lane].is_reset:
                self._interrupt_lane(lane, cause)
        actions = unbatch(state.actions)
        started = set()
        for row, lane in enumerate(state.slot.lanes):
            episode = runner._ongoing_episodes[lane]
            if lane in discarded:
                continue
            if not episode.is_reset:
                episode.add_env_reset(observation=observations[row], infos=infos[row])
                started.add(lane)
                continue
            extras = {key: column[row] for key, column in (state.extras or {}).items()}
            call.budget.timesteps += 1
            episode.add_env_step(
                observation=observations[row],
                action=actions[row],
                reward=batch.rewards[row],
                infos=infos[row],
                terminated=batch.terminated[row],
                truncated=batch.truncated[row],
                extra_model_outputs={**extras, WEIGHTS_SEQ_NO: runner._weights_seq_no},
            )
        batched = {
            Columns.OBS: observations,
            Columns.ACTIONS: actions,
            Columns.REWARDS: batch.rewards,
            Columns.INFOS: infos,
            Columns.TERMINATEDS: batch.terminated,
            Columns.TRUNCATEDS: batch.truncated,
        }
        with self._placeholders(state, discarded, batched):
            self.prepare(state, batched)
        stepped = [lane for lane in state.slot.lanes if lane not in discarded]
        call.returned += [episode for _, episode in self._advance(stepped, started)]

    @contextlib.contextmanager
    def _placeholders(
        self, state: SlotState, discarded: Collection[int], batched: dict[str, Any]
    ) -> Iterator[None]:
        """Show connectors a placeholder episode in lanes whose step is discarded.

        They want an episode for each lane. A placeholder is no part of any sample: what connectors
        write goes with it, and not into the last step of the episode that has ended, which they
        have seen already.
        """
        episodes = self._runner._ongoing_episodes
        fresh = {lane: episodes[lane] for lane in discarded}
        for lane in discarded:
            row = lane - state.slot.lanes.start
            placeholder = SingleAgentEpisode(
                observation_space=self._runner.env.single_observation_space,
                action_space=self._runner.env.single_action_space,
            )
            placeholder.add_env_reset(
                observation=batched[Columns.OBS][row], infos=batched[Columns.INFOS][row]
            )
            episodes[lane] = placeholder
        yield
        for lane, episode in fresh.items():
            episodes[lane] = episode

    def _end(self, lane: int) -> SingleAgentEpisode:
        self._call_back("on_episode_end", lane)
        ended = self._converted(self._runner._ongoing_episodes[lane])
        self._runner._new_episode(lane, self._runner._ongoing_episodes)
        return ended

    def _truncate(self, lane: int, cause: Exception | str) -> SingleAgentEpisode | None:
        episode = self._runner._ongoing_episodes[lane]
        truncate(episode, cause)
        is_empty = len(episode) == 0  # its steps so far have been returned already
        ended = self._end(lane)
        return None if is_empty else ended
