"""RLlib's per-item path for lanes with one agent each."""

from collections.abc import Callable
from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import batch, unbatch

from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.sampling_path import PerItemPath
from rlmesh_ray.rllib.runner.session_recovery import truncate
from rlmesh_ray.rllib.runner.slot import Slot


class SingleAgentPath(PerItemPath):
    """Does what RLlib's SingleAgentEnvRunner does between two steps, for the lanes of one slot."""

    def _act(self, slot: Slot) -> None:
        call = self._sampling.call
        if call.random_actions:
            self.send(slot, {Columns.ACTIONS: self._random(slot)})
        else:
            self.send(slot, self._choose(slot, call.timesteps))

    def send(self, slot: Slot, to_env: dict[str, Any]) -> None:
        """Send what the connectors have made of the module's output; one item a lane."""
        slot.actions = to_env.pop(Columns.ACTIONS)
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, slot.actions)
        slot.extras = to_env
        # A lane that has ended is not stepped but starts anew.
        num_timesteps = sum(episode.is_reset for episode in self._episodes_of(slot))
        self._step(slot, actions_for_env, num_timesteps)

    def _run(self, in_torch: Callable[[Any], Any], to_module: Any) -> Any:
        explore = self._sampling.call.explore
        choice = self._runner.inference_choice(explore=explore, draws=False)
        return choice.run(in_torch, to_module)

    def _random(self, slot: Slot) -> Any:
        actions = self._runner.env.action_space.sample()
        if len(slot.lanes) == self._runner.num_envs:
            return actions
        return batch(unbatch(actions)[slot.lanes.start : slot.lanes.stop])

    def add_resets(self, slot: Slot, batch: SessionBatch) -> None:
        observations, infos = unbatch(batch.observation), list(batch.infos)
        episodes = self._episodes_of(slot)
        for episode, observation, lane_info in zip(episodes, observations, infos, strict=True):
            episode.add_env_reset(observation=observation, infos=lane_info)
        self.prepare(slot, {Columns.OBS: observations, Columns.INFOS: infos})
        self._start(slot.lanes)

    def add_steps(self, slot: Slot, batch: SessionBatch) -> None:
        lane_episodes, call = self._sampling.episodes, self._sampling.call
        observations, infos = unbatch(batch.observation), list(batch.infos)
        actions = unbatch(slot.actions)
        started = set()
        for row, lane in enumerate(slot.lanes):
            episode = lane_episodes[lane]
            if not episode.is_reset:
                episode.add_env_reset(observation=observations[row], infos=infos[row])
                started.add(lane)
                continue
            extras = {key: column[row] for key, column in (slot.extras or {}).items()}
            call.timesteps += 1
            episode.add_env_step(
                observation=observations[row],
                action=actions[row],
                reward=batch.rewards[row],
                infos=infos[row],
                terminated=batch.terminated[row],
                truncated=batch.truncated[row],
                extra_model_outputs={**extras, WEIGHTS_SEQ_NO: call.weights_seq_no},
            )
        batched = {
            Columns.OBS: observations,
            Columns.ACTIONS: actions,
            Columns.REWARDS: batch.rewards,
            Columns.INFOS: infos,
            Columns.TERMINATEDS: batch.terminated,
            Columns.TRUNCATEDS: batch.truncated,
        }
        self.prepare(slot, batched)
        call.returned += [episode for _, episode in self._advance(slot.lanes, started)]

    def _end(self, lane: int) -> SingleAgentEpisode:
        self._runner.call_back("on_episode_end", lane)
        ended = self._converted(self._sampling.episodes[lane])
        self._runner.begin_episode(lane)
        return ended

    def _truncate(self, lane: int, cause: Exception | str) -> SingleAgentEpisode | None:
        episode = self._sampling.episodes[lane]
        truncate(episode, cause)
        is_empty = len(episode) == 0  # its steps so far have been returned already
        ended = self._end(lane)
        return None if is_empty else ended
