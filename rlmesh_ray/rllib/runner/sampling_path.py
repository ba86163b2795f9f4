"""What a runner's sampling loop shares with its path, and the path: its strategy.

The path chooses actions and builds episodes. ``FastPath`` processes all lanes of a slot as arrays.
``SingleAgentPath`` and ``MultiAgentPath`` are RLlib's own per-item path: connectors, module and
callbacks see the slot's lanes as they would see all of the runner's, in RLlib's own order.
"""

import abc
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.rllib.utils.metrics import (
    ENV_TO_MODULE_CONNECTOR,
    MODULE_TO_ENV_CONNECTOR,
    RLMODULE_INFERENCE_TIMER,
)

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments
from rlmesh_ray.rllib.runner.slot import Slot

if TYPE_CHECKING:
    from rlmesh_ray.rllib.runner.env_runner import SlotRunner
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import batch, unbatch

from rlmesh_ray.rllib.runner.autoreset_emulation import SessionBatch
from rlmesh_ray.rllib.runner.session_recovery import truncate, truncate_agents

_EPISODES_MAP = "vector_env_episodes_map"
"""Where RLlib's connectors look for the new episode of a lane whose episode has just ended."""


@dataclass(slots=True)
class SampleCall:
    """A call of ``sample``: what was asked for, and the results so far.

    Timesteps are requested ahead: once those that have been requested are enough, no slot is
    stepped any more. So a call brings the number that was asked for and less than one slot's lanes
    beyond, all of it with the weights of this call, and no step is in flight at its end. Episodes
    are counted as they end: steps of other slots may be in flight then.
    """

    num_timesteps: int | None
    num_episodes: int | None
    """One of both is None."""
    explore: bool = True
    random_actions: bool = False
    weights_seq_no: int = 0
    """RLlib's version of the module's weights."""
    deadline_s: float | None = None
    """When to return although no endpoint has answered, by ``time.monotonic``; None: never."""
    timesteps: int = 0
    """Timesteps that have arrived: of environments, or of agents (``count_steps_by``)."""
    episodes: int = 0
    in_flight: int = 0
    """Timesteps that were requested and have not arrived."""
    env_steps: int = 0
    """Environment steps of lanes with several agents."""
    returned: list[Any] = field(default_factory=list)
    """Episodes that have ended, in RLlib's order."""
    interrupted: list[Any] = field(default_factory=list)
    """Episodes that a failure or a move of their session has truncated."""

    @property
    def is_open(self) -> bool:
        if self.num_timesteps is None:
            return not self.is_full
        return self.timesteps + self.in_flight < self.num_timesteps

    @property
    def is_full(self) -> bool:
        if self.num_timesteps is not None:
            return self.timesteps >= self.num_timesteps and not self.in_flight
        assert self.num_episodes is not None
        return self.episodes >= self.num_episodes


class SamplingState:
    """The sessions of a runner, the running episodes of its lanes, and the call in progress."""

    slots: Sequence[Slot] = ()
    assignments: SessionAssignments
    """Where the sessions are opened."""
    path: "SamplingPath"
    """Chooses actions and builds episodes."""
    episodes: list[Any]
    """RLlib's list of the running episodes, one for each lane."""
    call: SampleCall
    """The call of ``sample`` in progress, or the last one."""


class SamplingPath(abc.ABC):
    """Chooses actions for slots, and builds RLlib's episodes of their results.

    Results go into the ``SampleCall`` of the runner's ``SamplingState``.
    """

    def resume(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare a call of ``sample`` that continues the running episodes."""

    @abc.abstractmethod
    def act_on(self, idle: Sequence[Slot]) -> None:
        """Choose and send actions for idle slots, as long as the budget is open."""

    @abc.abstractmethod
    def add_resets(self, slot: Slot, batch: Any) -> None:
        """Begin the episodes of a slot whose lanes have all been reset."""

    @abc.abstractmethod
    def add_steps(self, slot: Slot, batch: Any) -> None:
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
    """Keeps one episode object for each lane in ``SamplingState.episodes``, as RLlib's runners do.

    Args:
        runner: The runner that samples.
    """

    def __init__(self, runner: "SlotRunner") -> None:
        self._runner = runner
        self._sampling = runner.sampling

    def act_on(self, idle: Sequence[Slot]) -> None:
        for slot in idle:
            if self._sampling.call.is_open:
                self._act(slot)

    @abc.abstractmethod
    def _act(self, slot: Slot) -> None:
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
        return episode.to_numpy() if self._runner.episodes_to_numpy else episode

    # --- from observations to actions -----------------------------------------------------

    def prepare(self, slot: Slot, batched: dict[str, Any], ended: Sequence[Any] = ()) -> None:
        """Run the env-to-module connectors; their output is the next forward pass's input.

        Args:
            slot: The slot.
            batched: What has arrived, as RLlib hands it to connectors; one item a lane.
            ended: Episodes that ended with this step and are not among the running ones any more:
                what connectors write into episodes must be in their last step, too.
        """
        runner = self._runner
        if runner.module is None:
            return
        common = {
            "explore": self._sampling.call.explore,
            "rl_module": runner.module,
            "shared_data": slot.shared_data,
            **batched,
        }
        env_to_module, _ = runner.pipelines
        if ended:
            env_to_module(episodes=ended, batch={}, metrics=None, **common)
        slot.to_module = env_to_module(
            episodes=self._episodes_of(slot),
            batch={},
            metrics=runner.metrics,
            metrics_prefix_key=(ENV_TO_MODULE_CONNECTOR,),
            **common,
        )

    def _choose(self, slot: Slot, sampled: int) -> dict[str, Any]:
        """Run the module and the module-to-env connectors.

        Args:
            slot: The slot.
            sampled: Environment steps of this call of ``sample`` so far.
        """
        runner = self._runner
        to_module, slot.to_module = slot.to_module, None
        _, module_to_env = runner.pipelines
        chosen: dict[str, Any] = module_to_env(
            rl_module=runner.module,
            batch=self._forward(to_module, sampled),
            episodes=self._episodes_of(slot),
            explore=self._sampling.call.explore,
            shared_data=slot.shared_data,
            metrics=runner.metrics,
            metrics_prefix_key=(MODULE_TO_ENV_CONNECTOR,),
        )
        return chosen

    def _forward(self, to_module: Any, sampled: int) -> Any:
        runner = self._runner
        with runner.metrics.log_time(RLMODULE_INFERENCE_TIMER):
            if not self._sampling.call.explore:
                return self._run(runner.module.forward_inference, to_module)
            num_runners = runner.config.num_env_runners or 1
            per_runner = runner.num_env_steps_sampled_lifetime // num_runners
            t = (per_runner + sampled) * num_runners
            return self._run(partial(runner.module.forward_exploration, t=t), to_module)

    def _run(self, in_torch: Callable[[Any], Any], to_module: Any) -> Any:
        """Run the module; ``in_torch`` is its method."""
        return in_torch(to_module)

    def _step(self, slot: Slot, actions: Any, num_timesteps: int) -> None:
        slot.num_in_flight = num_timesteps
        self._sampling.call.in_flight += num_timesteps
        slot.step(actions)
        self._runner.count_attempts(1)

    # --- from results to episodes ---------------------------------------------------------

    def _episodes_of(self, slot: Slot) -> list[Any]:
        return self._sampling.episodes[slot.lanes.start : slot.lanes.stop]

    def _start(self, lanes: Iterable[int]) -> None:
        for lane in lanes:
            self._runner.call_back("on_episode_start", lane)

    def _advance(self, lanes: Iterable[int], started: Collection[int]) -> list[tuple[int, Any]]:
        """Call the callbacks after a step; return the lanes and episodes that ended with it.

        Args:
            lanes: The lanes that were stepped or began a new episode.
            started: Those of them that began a new episode.
        """
        ended = []
        call = self._sampling.call
        for lane in lanes:
            self._runner.call_back(
                "on_episode_start" if lane in started else "on_episode_step", lane
            )
            if self._sampling.episodes[lane].is_done:
                call.episodes += 1
                ended.append((lane, self._end(lane)))
                if call.num_episodes is not None and call.is_full:
                    break
        return ended

    def interrupt(self, slot: Slot, cause: RlmeshError) -> int:
        """See ``SamplingPath``; lanes whose episodes have not begun keep them."""
        is_begun = [self._sampling.episodes[lane].is_reset for lane in slot.lanes]
        for lane in itertools.compress(slot.lanes, is_begun):
            episode = self._sampling.episodes[lane]
            returned = self._truncate(lane, cause)
            self._runner.forget_chunks(episode.id_)
            if returned is not None:
                self._sampling.call.interrupted.append(returned)
        return sum(is_begun)

    def conclude(self, *, continues: bool) -> list[Any]:
        chunks: list[Any] = []
        if not continues:
            return chunks
        episodes = self._sampling.episodes
        lookback = self._runner.config.episode_lookback_horizon
        for lane, episode in enumerate(episodes):
            t = self._timestep(episode)
            if len(episode) == 0 and t:
                continue  # not stepped in this call
            episodes[lane] = episode.cut(len_lookback_buffer=lookback)
            if t == 0:
                continue  # just begun: it has no step yet
            episode.validate()
            self._runner.keep_chunk(episode)
            chunks.append(self._converted(episode))
        return chunks


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
