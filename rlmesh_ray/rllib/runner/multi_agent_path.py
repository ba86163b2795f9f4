"""RLlib's per-item path for lanes with several agents each."""

from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rlmesh_ray.rllib.runner.multi_agent_columns import AgentBatch
from rlmesh_ray.rllib.runner.sampling_path import PerItemPath
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate_agents

_EPISODES_MAP = "vector_env_episodes_map"
"""Where RLlib's connectors look for the new episode of a lane whose episode has just ended."""


class MultiAgentPath(PerItemPath):
    """Does what RLlib's MultiAgentEnvRunner does between two steps, for the lanes of one slot."""

    def _act(self, state: SlotState) -> None:
        episodes, call = self._episodes_of(state), self._runner._call
        to_env: dict[str, Any] = {}
        if call.random_actions:
            to_env = {Columns.ACTIONS: [self._random(episode) for episode in episodes]}
        elif state.to_module:  # empty where all lanes have ended
            to_env = self._choose(state, call.env_steps)
        state.shared_data[_EPISODES_MAP] = {}
        state.actions = to_env.pop(Columns.ACTIONS, [{} for _ in episodes])
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, state.actions)
        state.extras = to_env
        # RLlib also ends an episode when all agents that took part in it have ended, and lets
        # no agent act in that lane then, not even those that have just joined.
        actions_for_env = [
            own if episode.is_reset else None
            for episode, own in zip(episodes, actions_for_env, strict=True)
        ]
        # A lane that has ended is not stepped but starts anew.
        num_timesteps = sum(
            1 if self._counts_env_steps else len(actions)
            for episode, actions in zip(episodes, state.actions, strict=True)
            if episode.is_reset
        )
        self._step(state, actions_for_env, num_timesteps)

    def _random(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        return {
            agent: self._runner.env.envs[0].get_action_space(agent).sample()
            for agent in episode.get_agents_to_act()
        }

    @property
    def _counts_env_steps(self) -> bool:
        return bool(self._runner.config.count_steps_by == "env_steps")

    def add_resets(self, state: SlotState, batch: AgentBatch) -> None:
        """See ``SamplingPath``."""
        for row, episode in enumerate(self._episodes_of(state)):
            episode.add_env_reset(observations=batch.observations[row], infos=batch.infos[row])
        self.prepare(state, {Columns.OBS: batch.observations, Columns.INFOS: batch.infos})
        self._start(state.slot.lanes)

    def add_steps(self, state: SlotState, batch: AgentBatch) -> None:
        """See ``SamplingPath``."""
        episodes = self._runner._ongoing_episodes
        started = set()
        for row, lane in enumerate(state.slot.lanes):
            if row in batch.discarded:
                continue
            if episodes[lane].is_reset:
                self._add_step(episodes[lane], state, batch, row)
            else:
                episodes[lane].add_env_reset(
                    observations=batch.observations[row], infos=batch.infos[row]
                )
                started.add(lane)
        replaced = state.shared_data[_EPISODES_MAP]
        for row, cause in batch.discarded.items():
            lane = state.slot.lanes[row]
            if episodes[lane].is_reset:
                former_id = episodes[lane].id_
                self._interrupt_lane(lane, cause)
                replaced[former_id] = episodes[lane].id_
        stepped = [lane for row, lane in enumerate(state.slot.lanes) if row not in batch.discarded]
        ended = []
        for lane, episode in self._advance(stepped, started):
            replaced[episode.id_] = episodes[lane].id_
            ended.append(episode)
        batched = {
            Columns.OBS: batch.observations,
            Columns.ACTIONS: state.actions,
            Columns.REWARDS: batch.rewards,
            Columns.INFOS: batch.infos,
            Columns.TERMINATEDS: batch.terminated,
            Columns.TRUNCATEDS: batch.truncated,
        }
        self.prepare(state, batched, ended)
        self._runner._call.returned += map(self._converted, ended)

    def _add_step(
        self, episode: MultiAgentEpisode, state: SlotState, batch: AgentBatch, row: int
    ) -> None:
        runner, call = self._runner, self._runner._call
        extras: dict[str, dict[str, Any]] = {}
        for column, by_lane in (state.extras or {}).items():
            for agent, value in by_lane[row].items():
                own = extras.setdefault(agent, {WEIGHTS_SEQ_NO: runner._weights_seq_no})
                own[column] = value
        observations = batch.observations[row]
        episode.add_env_step(
            observations=observations,
            actions=state.actions[row],
            rewards=batch.rewards[row],
            infos=batch.infos[row],
            terminateds=batch.terminated[row],
            truncateds=batch.truncated[row],
            extra_model_outputs=extras,
        )
        runner._log_env_steps(runner._metrics_num_env_steps_sampled, 1)
        runner._increase_sampled_metrics(1, observations, episode)
        call.env_steps += 1
        call.budget.timesteps += 1 if self._counts_env_steps else len(observations)

    def _timestep(self, episode: MultiAgentEpisode) -> int:
        return int(episode.env_t)

    def _converted(self, episode: MultiAgentEpisode) -> MultiAgentEpisode:
        self._runner._prune_zero_len_sa_episodes(episode)
        return super()._converted(episode)

    def _end(self, lane: int) -> MultiAgentEpisode:
        self._call_back("on_episode_end", lane)
        episode = self._runner._ongoing_episodes[lane]
        # Before the connectors see it for the last time, in prepare.
        self._runner._prune_zero_len_sa_episodes(episode)
        self._runner._new_episode(lane, self._runner._ongoing_episodes)
        return episode

    def _truncate(self, lane: int, cause: Exception | str) -> MultiAgentEpisode | None:
        truncate_agents(self._runner._ongoing_episodes[lane], cause)
        ended = self._end(lane)
        return self._converted(ended) if ended.agent_episodes else None
