"""The episodes of a runner whose lanes do not all move at once."""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import (
    ENV_TO_MODULE_CONNECTOR,
    MODULE_TO_ENV_CONNECTOR,
    WEIGHTS_SEQ_NO,
)
from ray.rllib.utils.spaces.space_utils import batch, unbatch

from rlmesh_ray.rllib.runner.session_group import GroupBatch
from rlmesh_ray.rllib.runner.slot import Slot
from rlmesh_ray.rllib.runner.slot_runner import SlotRunner
from rlmesh_ray.rllib.runner.slot_state import SlotState
from rlmesh_ray.rllib.runner.truncation import truncate


class SingleAgentEpisodes(SlotRunner, SingleAgentEnvRunner):
    """Does what RLlib's runner does between two steps, for the lanes of one slot.

    Connectors, module and callbacks see the slot's lanes as they would see all of the runner's, in
    RLlib's own order.
    """

    # --- from observations to actions ---------------------------------------------------

    def _act(self, state: SlotState) -> None:
        if self._random_actions:
            self._send(state, {Columns.ACTIONS: self._random(state.slot)})
            return
        to_module, state.to_module = state.to_module, None
        to_env = self._module_to_env(
            rl_module=self.module,
            batch=self._forward(to_module, self._budget.timesteps),
            episodes=self._episodes_of(state),
            explore=self._explore,
            shared_data=state.shared_data,
            metrics=self.metrics,
            metrics_prefix_key=(MODULE_TO_ENV_CONNECTOR,),
        )
        self._send(state, to_env)

    def _send(self, state: SlotState, to_env: dict[str, Any]) -> None:
        """Send off what the connectors have made of the module's output; one item a lane."""
        state.actions = to_env.pop(Columns.ACTIONS)
        actions_for_env = to_env.pop(Columns.ACTIONS_FOR_ENV, state.actions)
        state.extras = to_env
        # A lane that has ended is not stepped but starts anew.
        num_in_flight = sum(episode.is_reset for episode in self._episodes_of(state))
        self._ask(state, actions_for_env, num_in_flight)

    def _random(self, slot: Slot) -> Any:
        actions = self.env.action_space.sample()
        if len(slot.lanes) == self.num_envs:
            return actions
        return batch(unbatch(actions)[slot.lanes.start : slot.lanes.stop])

    # --- from answers to episodes --------------------------------------------------------

    def _add_resets(self, state: SlotState, arrived: GroupBatch) -> None:
        observations, infos = unbatch(arrived.observation), list(arrived.infos)
        for lane, observation, own_infos in zip(state.slot.lanes, observations, infos, strict=True):
            self._ongoing_episodes[lane].add_env_reset(observation=observation, infos=own_infos)
        self._prepare(state, {Columns.OBS: observations, Columns.INFOS: infos})
        for lane in state.slot.lanes:
            self._make_on_episode_callback("on_episode_start", lane, self._ongoing_episodes)

    def _add_steps(self, state: SlotState, arrived: GroupBatch) -> None:
        observations, infos = unbatch(arrived.observation), list(arrived.infos)
        discarded = {state.slot.lanes[row]: cause for row, cause in arrived.discarded.items()}
        for lane, cause in discarded.items():
            if self._ongoing_episodes[lane].is_reset:
                self._interrupt_lane(lane, cause)
        actions = unbatch(state.actions)
        started = set()
        for row, lane in enumerate(state.slot.lanes):
            episode = self._ongoing_episodes[lane]
            if lane in discarded:
                continue
            if not episode.is_reset:
                episode.add_env_reset(observation=observations[row], infos=infos[row])
                started.add(lane)
                continue
            extras = {key: column[row] for key, column in (state.extras or {}).items()}
            self._budget.timesteps += 1
            episode.add_env_step(
                observation=observations[row],
                action=actions[row],
                reward=arrived.rewards[row],
                infos=infos[row],
                terminated=arrived.terminated[row],
                truncated=arrived.truncated[row],
                extra_model_outputs={**extras, WEIGHTS_SEQ_NO: self._weights_seq_no},
            )
        batched = {
            Columns.OBS: observations,
            Columns.ACTIONS: actions,
            Columns.REWARDS: arrived.rewards,
            Columns.INFOS: infos,
            Columns.TERMINATEDS: arrived.terminated,
            Columns.TRUNCATEDS: arrived.truncated,
        }
        with self._standing_in(state, discarded, batched):
            self._prepare(state, batched)
        self._tell_of_steps([lane for lane in state.slot.lanes if lane not in discarded], started)

    @contextlib.contextmanager
    def _standing_in(
        self, state: SlotState, discarded: Collection[int], batched: dict[str, Any]
    ) -> Iterator[None]:
        """Let connectors see an episode in lanes whose step is discarded: they want one of each.

        It is no part of any sample. What they write goes with it, and not into the last step of the
        episode that has ended, which they have seen already.
        """
        fresh = {lane: self._ongoing_episodes[lane] for lane in discarded}
        for lane in discarded:
            row = lane - state.slot.lanes.start
            stand_in = SingleAgentEpisode(
                observation_space=self.env.single_observation_space,
                action_space=self.env.single_action_space,
            )
            stand_in.add_env_reset(
                observation=batched[Columns.OBS][row], infos=batched[Columns.INFOS][row]
            )
            self._ongoing_episodes[lane] = stand_in
        yield
        for lane, episode in fresh.items():
            self._ongoing_episodes[lane] = episode

    def _tell_of_steps(self, stepped: Sequence[int], started: Collection[int]) -> None:
        """Call the callbacks after a step, and take the episodes that have ended with it."""
        for lane in stepped:
            which = "on_episode_start" if lane in started else "on_episode_step"
            self._make_on_episode_callback(which, lane, self._ongoing_episodes)
            if self._ongoing_episodes[lane].is_done:
                self._budget.episodes += 1
                self._returned.append(self._ended(lane))
                if self._budget.num_episodes is not None and self._budget.is_full:
                    break

    def _prepare(self, state: SlotState, batched: dict[str, Any]) -> None:
        """Make the next forward pass's input of what has come."""
        if self.module is None:
            return
        state.to_module = self._env_to_module(
            episodes=self._episodes_of(state),
            batch={},
            explore=self._explore,
            rl_module=self.module,
            shared_data=state.shared_data,
            metrics=self.metrics,
            metrics_prefix_key=(ENV_TO_MODULE_CONNECTOR,),
            **batched,
        )

    def _episodes_of(self, state: SlotState) -> list[SingleAgentEpisode]:
        return self._ongoing_episodes[state.slot.lanes.start : state.slot.lanes.stop]

    def _ended(self, lane: int) -> SingleAgentEpisode:
        """Return a lane's episode, which is over, and put a new one in its place."""
        self._make_on_episode_callback("on_episode_end", lane, self._ongoing_episodes)
        episode = self._ongoing_episodes[lane]
        returned = episode.to_numpy() if self.episodes_to_numpy else episode
        self._new_episode(lane, self._ongoing_episodes)
        return returned

    def _truncate(self, lane: int, cause: Exception | str) -> SingleAgentEpisode | None:
        episode = self._ongoing_episodes[lane]
        truncate(episode, cause)
        is_empty = len(episode) == 0  # what happened before has been returned already
        ended = self._ended(lane)
        return None if is_empty else ended

    def _cut_ongoing(self) -> list[SingleAgentEpisode]:
        lookback = self.config.episode_lookback_horizon
        chunks = []
        for lane, episode in enumerate(self._ongoing_episodes):
            if len(episode) == 0 and episode.t:
                continue  # others had their turn
            self._ongoing_episodes[lane] = episode.cut(len_lookback_buffer=lookback)
            if episode.t == 0:
                continue  # just begun: nothing in it yet
            episode.validate()
            self._ongoing_episodes_for_metrics[episode.id_].append(episode)
            chunks.append(episode.to_numpy() if self.episodes_to_numpy else episode)
        return chunks

    def _log_sampled(self) -> None:
        if self._budget.timesteps:
            self._log_env_steps(self._metrics_num_env_steps_sampled, self._budget.timesteps)
        self._increase_sampled_metrics(self._budget.timesteps, len(self._returned))
