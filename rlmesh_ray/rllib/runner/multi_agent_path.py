"""RLlib's per-item path for lanes with several agents each."""

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.sampling_path import PerItemPath
from rlmesh_ray.rllib.runner.session_recovery import truncate_agents
from rlmesh_ray.rllib.runner.slot import Slot

_EPISODES_MAP = "vector_env_episodes_map"
"""Where RLlib's connectors look for the new episode of a lane whose episode has just ended."""


class MultiAgentPath(PerItemPath):
    """Does what RLlib's MultiAgentEnvRunner does between two steps, for the lanes of one slot."""

    def _act(self, slot: Slot) -> None:
        episodes, call = self._episodes_of(slot), self._sampling.call
        to_env: dict[str, Any] = {}
        if call.random_actions:
            to_env = {Columns.ACTIONS: [self._random(episode) for episode in episodes]}
        elif slot.to_module:  # empty where all lanes have ended
            to_env = self._choose(slot, call.env_steps)
        slot.shared_data[_EPISODES_MAP] = {}
        slot.actions = to_env.pop(Columns.ACTIONS, [{} for _ in episodes])
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, slot.actions)
        slot.extras = to_env
        # RLlib also ends an episode when all agents that took part in it have ended, and lets
        # no agent act in that lane then, not even those that have just joined.
        actions_for_env = [
            own if episode.is_reset else None
            for episode, own in zip(episodes, actions_for_env, strict=True)
        ]
        # A lane that has ended is not stepped but starts anew.
        num_timesteps = sum(
            1 if self._counts_env_steps else len(actions)
            for episode, actions in zip(episodes, slot.actions, strict=True)
            if episode.is_reset
        )
        self._step(slot, actions_for_env, num_timesteps)

    def _random(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        return {
            agent: self._runner.env.envs[0].get_action_space(agent).sample()
            for agent in episode.get_agents_to_act()
        }

    @property
    def _counts_env_steps(self) -> bool:
        return bool(self._runner.config.count_steps_by == "env_steps")

    def add_resets(self, slot: Slot, batch: SessionBatch) -> None:
        for row, episode in enumerate(self._episodes_of(slot)):
            episode.add_env_reset(observations=batch.observation[row], infos=batch.infos[row])
        self.prepare(slot, {Columns.OBS: batch.observation, Columns.INFOS: batch.infos})
        self._start(slot.lanes)

    def add_steps(self, slot: Slot, batch: SessionBatch) -> None:
        episodes = self._sampling.episodes
        started = set()
        for row, lane in enumerate(slot.lanes):
            if episodes[lane].is_reset:
                self._add_step(episodes[lane], slot, batch, row)
            else:
                episodes[lane].add_env_reset(
                    observations=batch.observation[row], infos=batch.infos[row]
                )
                started.add(lane)
        replaced = slot.shared_data[_EPISODES_MAP]
        ended = []
        for lane, episode in self._advance(slot.lanes, started):
            replaced[episode.id_] = episodes[lane].id_
            ended.append(episode)
        batched = {
            Columns.OBS: batch.observation,
            Columns.ACTIONS: slot.actions,
            Columns.REWARDS: batch.rewards,
            Columns.INFOS: batch.infos,
            Columns.TERMINATEDS: batch.terminated,
            Columns.TRUNCATEDS: batch.truncated,
        }
        self.prepare(slot, batched, ended)
        self._sampling.call.returned += map(self._converted, ended)

    def _add_step(
        self, episode: MultiAgentEpisode, slot: Slot, batch: SessionBatch, row: int
    ) -> None:
        call = self._sampling.call
        extras: dict[str, dict[str, Any]] = {}
        for column, by_lane in (slot.extras or {}).items():
            for agent, value in by_lane[row].items():
                own = extras.setdefault(agent, {WEIGHTS_SEQ_NO: call.weights_seq_no})
                own[column] = value
        observations = batch.observation[row]
        episode.add_env_step(
            observations=observations,
            actions=slot.actions[row],
            rewards=batch.rewards[row],
            infos=batch.infos[row],
            terminateds=batch.terminated[row],
            truncateds=batch.truncated[row],
            extra_model_outputs=extras,
        )
        self._runner.count_step(observations, episode)
        call.env_steps += 1
        call.timesteps += 1 if self._counts_env_steps else len(observations)

    def _timestep(self, episode: MultiAgentEpisode) -> int:
        return int(episode.env_t)

    def _converted(self, episode: MultiAgentEpisode) -> MultiAgentEpisode:
        self._runner.prune(episode)
        return super()._converted(episode)

    def _end(self, lane: int) -> MultiAgentEpisode:
        self._runner.call_back("on_episode_end", lane)
        episode: MultiAgentEpisode = self._sampling.episodes[lane]
        # Before the connectors see it for the last time, in prepare.
        self._runner.prune(episode)
        self._runner.begin_episode(lane)
        return episode

    def _truncate(self, lane: int, cause: Exception | str) -> MultiAgentEpisode | None:
        truncate_agents(self._sampling.episodes[lane], cause)
        ended = self._end(lane)
        return self._converted(ended) if ended.agent_episodes else None
