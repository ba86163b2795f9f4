"""The episodes of a multi-agent runner whose lanes do not all move at once."""

from collections.abc import Sequence
from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    ENV_TO_MODULE_CONNECTOR,
    MODULE_TO_ENV_CONNECTOR,
    WEIGHTS_SEQ_NO,
)

from rlmesh_ray.rllib.runner.multi_agent_env import AgentBatch
from rlmesh_ray.rllib.runner.slot_runner import SlotRunner
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate_agents

_EPISODES_MAP = "vector_env_episodes_map"
"""Where RLlib's connectors look for the new episode of a lane whose episode has just ended."""


class MultiAgentEpisodes(SlotRunner, MultiAgentEnvRunner):
    """Does what RLlib's runner does between two steps, for the lanes of one slot.

    Connectors, module and callbacks see the slot's lanes as they would see all of the runner's, in
    RLlib's own order.
    """

    _num_env_steps: int
    """Of this call of ``sample``, which may count the agents' steps instead."""

    @override(MultiAgentEnvRunner)
    def _sample(self, **kwargs: Any) -> list[MultiAgentEpisode]:
        self._num_env_steps = 0
        return super()._sample(**kwargs)

    # --- from observations to actions ---------------------------------------------------

    def _act(self, state: SlotState) -> None:
        episodes = self._episodes_of(state)
        if self._random_actions:
            to_env = {Columns.ACTIONS: [self._random(episode) for episode in episodes]}
        else:
            to_env = self._chosen(state)
        state.shared_data[_EPISODES_MAP] = {}
        state.actions = to_env.pop(Columns.ACTIONS, [{} for _ in episodes])
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, state.actions)
        state.extras = to_env
        # A lane that has ended is not stepped but starts anew.
        num_in_flight = sum(
            1 if self._counts_env_steps else len(actions)
            for episode, actions in zip(episodes, state.actions, strict=True)
            if episode.is_reset
        )
        self._ask(state, actions_for_env, num_in_flight)

    def _random(self, episode: MultiAgentEpisode) -> dict[str, Any]:
        return {
            agent: self.env.envs[0].get_action_space(agent).sample()
            for agent in episode.get_agents_to_act()
        }

    def _chosen(self, state: SlotState) -> dict[str, Any]:
        to_module, state.to_module = state.to_module, None
        if not to_module:  # all lanes have ended
            return {}
        to_env: dict[str, Any] = self._module_to_env(
            rl_module=self.module,
            batch=self._forward(to_module, self._num_env_steps),
            episodes=self._episodes_of(state),
            explore=self._explore,
            shared_data=state.shared_data,
            metrics=self.metrics,
            metrics_prefix_key=(MODULE_TO_ENV_CONNECTOR,),
        )
        return to_env

    @property
    def _counts_env_steps(self) -> bool:
        return bool(self.config.count_steps_by == "env_steps")

    # --- from answers to episodes --------------------------------------------------------

    def _add_resets(self, state: SlotState, arrived: AgentBatch) -> None:
        for row, lane in enumerate(state.slot.lanes):
            self._ongoing_episodes[lane].add_env_reset(
                observations=arrived.observations[row], infos=arrived.infos[row]
            )
        batched = {Columns.OBS: arrived.observations, Columns.INFOS: arrived.infos}
        self._prepare(state, [], batched)
        for lane in state.slot.lanes:
            self._make_on_episode_callback("on_episode_start", lane, self._ongoing_episodes)

    def _add_steps(self, state: SlotState, arrived: AgentBatch) -> None:
        started = set()
        for row, lane in enumerate(state.slot.lanes):
            episode = self._ongoing_episodes[lane]
            if row in arrived.discarded:
                pass
            elif episode.is_reset:
                self._add_step(episode, state, arrived, row)
            else:
                episode.add_env_reset(
                    observations=arrived.observations[row], infos=arrived.infos[row]
                )
                started.add(lane)
        for row, cause in arrived.discarded.items():
            lane = state.slot.lanes[row]
            former_id = self._ongoing_episodes[lane].id_
            self._interrupt_lane(lane, cause)
            state.shared_data[_EPISODES_MAP][former_id] = self._ongoing_episodes[lane].id_
        ended = self._tell_of_steps(state, started, set(arrived.discarded))
        batched = {
            Columns.OBS: arrived.observations,
            Columns.ACTIONS: state.actions,
            Columns.REWARDS: arrived.rewards,
            Columns.INFOS: arrived.infos,
            Columns.TERMINATEDS: arrived.terminated,
            Columns.TRUNCATEDS: arrived.truncated,
        }
        self._prepare(state, ended, batched)
        self._returned.extend(self._converted(episode) for episode in ended)

    def _add_step(
        self, episode: MultiAgentEpisode, state: SlotState, arrived: AgentBatch, row: int
    ) -> None:
        extras: dict[str, dict[str, Any]] = {}
        for column, by_lane in (state.extras or {}).items():
            for agent, value in by_lane[row].items():
                own = extras.setdefault(agent, {WEIGHTS_SEQ_NO: self._weights_seq_no})
                own[column] = value
        observations = arrived.observations[row]
        episode.add_env_step(
            observations=observations,
            actions=state.actions[row],
            rewards=arrived.rewards[row],
            infos=arrived.infos[row],
            terminateds=arrived.terminated[row],
            truncateds=arrived.truncated[row],
            extra_model_outputs=extras,
        )
        self._log_env_steps(self._metrics_num_env_steps_sampled, 1)
        self._increase_sampled_metrics(1, observations, episode)
        self._num_env_steps += 1
        self._budget.timesteps += 1 if self._counts_env_steps else len(observations)

    def _tell_of_steps(
        self, state: SlotState, started: set[int], discarded: set[int]
    ) -> list[MultiAgentEpisode]:
        """Call the callbacks after a step; return the episodes that have ended with it."""
        ended = []
        for row, lane in enumerate(state.slot.lanes):
            if row in discarded:
                continue
            which = "on_episode_start" if lane in started else "on_episode_step"
            self._make_on_episode_callback(which, lane, self._ongoing_episodes)
            episode = self._ongoing_episodes[lane]
            if episode.is_done:
                self._budget.episodes += 1
                ended.append(self._ended(lane))
                state.shared_data[_EPISODES_MAP][episode.id_] = self._ongoing_episodes[lane].id_
                if self._budget.num_episodes is not None and self._budget.is_full:
                    break
        return ended

    def _prepare(
        self, state: SlotState, ended: Sequence[MultiAgentEpisode], batched: dict[str, Any]
    ) -> None:
        """Make the next forward pass's input of what has come."""
        if self.module is None:
            return
        common = {
            "batch": {},
            "explore": self._explore,
            "rl_module": self.module,
            "shared_data": state.shared_data,
            **batched,
        }
        if ended:  # what connectors write into episodes must be in their last step too
            self._env_to_module(episodes=ended, metrics=None, **common)
        state.to_module = self._env_to_module(
            episodes=self._episodes_of(state),
            metrics=self.metrics,
            metrics_prefix_key=(ENV_TO_MODULE_CONNECTOR,),
            **{**common, "batch": {}},
        )

    def _episodes_of(self, state: SlotState) -> list[MultiAgentEpisode]:
        return self._ongoing_episodes[state.slot.lanes.start : state.slot.lanes.stop]

    def _ended(self, lane: int) -> MultiAgentEpisode:
        """Return a lane's episode, which is over, and put a new one in its place."""
        self._make_on_episode_callback("on_episode_end", lane, self._ongoing_episodes)
        episode = self._ongoing_episodes[lane]
        self._prune_zero_len_sa_episodes(episode)
        self._new_episode(lane, self._ongoing_episodes)
        return episode

    def _converted(self, episode: MultiAgentEpisode) -> MultiAgentEpisode:
        return episode.to_numpy() if self.episodes_to_numpy else episode

    def _truncate(self, lane: int, cause: Exception | str) -> MultiAgentEpisode | None:
        truncate_agents(self._ongoing_episodes[lane], cause)
        ended = self._ended(lane)
        return self._converted(ended) if ended.agent_episodes else None

    def _cut_ongoing(self) -> list[MultiAgentEpisode]:
        lookback = self.config.episode_lookback_horizon
        chunks = []
        for lane, episode in enumerate(self._ongoing_episodes):
            if len(episode) == 0 and episode.env_t:
                continue  # others had their turn
            self._ongoing_episodes[lane] = episode.cut(len_lookback_buffer=lookback)
            if episode.env_t == 0:
                continue  # just begun: nothing in it yet
            episode.validate()
            self._ongoing_episodes_for_metrics[episode.id_].append(episode)
            self._prune_zero_len_sa_episodes(episode)
            chunks.append(self._converted(episode))
        return chunks

    def _log_sampled(self) -> None:
        """Nothing: RLlib's runner for several agents counts step by step."""
