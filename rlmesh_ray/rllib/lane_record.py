"""What the lanes of a slot go through, as arrays; RLlib's episodes are made of them at the end."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import _REWARDS_BOX_SPACE, SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

_FIRST_CAPACITY = 32


@dataclass(frozen=True, slots=True)
class Ended:
    """An episode that is over, or its last chunk."""

    at_s: float
    """When it ended, by ``time.perf_counter``."""
    episode: SingleAgentEpisode


class LaneRecord:
    """Takes one batch a vector step, at a cost that hardly depends on the number of lanes.

    The step after a lane's end begins its next episode (NEXT_STEP): what it was given to do then is
    no part of either. Episodes own what they hold.

    Args:
        observation: With which all lanes begin: one row a lane.
        infos: One a lane.
        lookback: So many steps before a chunk it brings along.
        observation_space: Of one lane.
        action_space: Likewise.
    """

    def __init__(
        self,
        observation: NDArray[Any],
        infos: Sequence[dict[str, Any]],
        *,
        lookback: int,
        observation_space: gymnasium.Space[Any],
        action_space: gymnasium.Space[Any],
    ) -> None:
        self._num_lanes = len(observation)
        self._lookback = lookback
        self._observation_space = observation_space
        self._action_space = action_space
        self._capacity = _FIRST_CAPACITY
        self._since = self._last = 0
        """Positions: of the latest cut, and the current one. A step leads from one to the next."""
        self._ids = [uuid.uuid4().hex for _ in range(self._num_lanes)]
        self._steps_before = [0] * self._num_lanes
        """Of the running episodes, at the latest cut."""
        self._observations = self._empty(observation)
        self._observations[:, 0] = observation
        # By step, that is, by the position it leads to; the first position has none.
        self._columns: dict[str, NDArray[Any]] = {}
        self._rewards = np.zeros((self._num_lanes, self._capacity), np.float64)
        self._terminated = np.zeros((self._capacity, self._num_lanes), np.bool_)
        self._truncated = np.zeros_like(self._terminated)
        self._infos: list[Sequence[dict[str, Any]]] = [infos]
        self._times_s = [time.perf_counter()]

    @property
    def is_over(self) -> NDArray[np.bool_]:
        """By lane, whether its episode ended with the latest step."""
        is_over: NDArray[np.bool_] = self._terminated[self._last] | self._truncated[self._last]
        return is_over

    @property
    def running_ids(self) -> list[str]:
        """Ids of the episodes that go on; to be asked right after ``cut``."""
        over = self.is_over.tolist()
        return [id_ for id_, is_over in zip(self._ids, over, strict=True) if not is_over]

    def takes(self, columns: Mapping[str, Any]) -> bool:
        """Tell whether ``columns`` are arrays of one row a lane, and of the kinds that came before.

        What changes its kind in the middle of an episode would be given another dtype here than
        RLlib gives it.
        """
        if not self._columns:
            return all(
                isinstance(column, np.ndarray) and column.shape[:1] == (self._num_lanes,)
                for column in columns.values()
            )
        kinds = {name: (each.dtype, each.shape[2:]) for name, each in self._columns.items()}
        return kinds == {
            name: (getattr(each, "dtype", None), getattr(each, "shape", ())[1:])
            for name, each in columns.items()
        }

    def add(
        self,
        observation: NDArray[Any],
        rewards: NDArray[np.float64],
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        infos: Sequence[dict[str, Any]],
        columns: Mapping[str, NDArray[Any]],
    ) -> None:
        """Add a step of all lanes. Arrays have one row a lane, and are copied.

        Args:
            observation: After the step.
            rewards: By lane.
            terminated: By lane.
            truncated: Likewise.
            infos: Likewise.
            columns: ``actions``, ``rewards``, and what else the module gave; see ``takes``.
        """
        goes_on = ~self.is_over
        if self._last + 1 >= self._capacity:
            self._grow()
        self._last += 1
        self._observations[:, self._last] = observation
        self._rewards[:, self._last] = rewards
        for name, column in columns.items():
            if name not in self._columns:
                self._columns[name] = self._empty(column)
            self._columns[name][:, self._last] = column
        np.logical_and(terminated, goes_on, out=self._terminated[self._last])
        np.logical_and(truncated, goes_on, out=self._truncated[self._last])
        self._infos.append(infos)
        self._times_s.append(time.perf_counter())

    def cut(self) -> tuple[list[Ended], list[SingleAgentEpisode]]:
        """Return what has come since the latest cut: what has ended, and chunks of what goes on."""
        ended: list[Ended] = []
        chunks: list[SingleAgentEpisode] = []
        for lane in range(self._num_lanes):
            start = self._end_episodes(lane, ended)
            if start < self._last:
                chunks.append(self._episode(lane, start, self._last))
                self._steps_before[lane] += self._last - start
        self._carry_on()
        ended.sort(key=lambda one: one.at_s)
        return ended, chunks

    def hand_over(self) -> tuple[list[Ended], list[SingleAgentEpisode]]:
        """Return what has ended since the latest cut, and what goes on, one a lane, as lists.

        So RLlib's own runner can go on with it; the record is of no use any more. A lane whose
        episode has just ended has it among these, too, with the last observation and no step.
        """
        ended: list[Ended] = []
        running = []
        for lane in range(self._num_lanes):
            start = min(self._end_episodes(lane, ended), self._last)
            running.append(_as_lists(self._episode(lane, start, self._last)))
        ended.sort(key=lambda one: one.at_s)
        return ended, running

    def _end_episodes(self, lane: int, ended: list[Ended]) -> int:
        """Add a lane's ended episodes; return the position where the running one begins."""
        start = self._since
        flags = (
            self._terminated[start : self._last + 1, lane],
            self._truncated[start : self._last + 1, lane],
        )
        for number in np.flatnonzero(flags[0] | flags[1]).tolist():
            end = self._since + number
            if number:
                episode = self._episode(lane, start, end)
                episode.is_terminated = bool(flags[0][number])
                episode.is_truncated = bool(flags[1][number])
                ended.append(Ended(self._times_s[end], episode))
            if end < self._last:
                self._ids[lane] = uuid.uuid4().hex
                self._steps_before[lane] = 0
            start = end + 1
        return start

    def _episode(self, lane: int, start: int, end: int) -> SingleAgentEpisode:
        """Return the part of a lane's episode between two positions."""
        steps_before = self._steps_before[lane]
        lookback = min(self._lookback, steps_before, start)
        first = start - lookback
        buffers = {
            name: InfiniteLookbackBuffer(column[lane, first + 1 : end + 1].copy(), lookback)
            for name, column in self._columns.items()
        }
        # Copies: a view would keep what all the other lanes have seen for as long as it lives.
        observations = self._observations[lane, first : end + 1].copy()
        infos = [by_lane[lane] for by_lane in self._infos[first : end + 1]]
        episode = SingleAgentEpisode(
            self._ids[lane],
            observations=InfiniteLookbackBuffer(observations, lookback),
            observation_space=self._observation_space,
            infos=InfiniteLookbackBuffer(infos, lookback),
            actions=buffers.pop(Columns.ACTIONS, None),  # None: no step yet
            action_space=self._action_space,
            rewards=InfiniteLookbackBuffer(
                self._rewards[lane, first + 1 : end + 1].copy(), lookback, _REWARDS_BOX_SPACE
            ),
            extra_model_outputs=buffers,
            t_started=steps_before,
        )
        episode._start_time = self._times_s[start]
        episode._last_step_time = self._times_s[end]
        return episode

    # --- arrays -----------------------------------------------------------------------------

    def _empty(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return room for such rows at each position: ``(num_lanes, capacity, *shape)``."""
        return np.empty((self._num_lanes, self._capacity, *rows.shape[1:]), rows.dtype)

    def _carry_on(self) -> None:
        """Use the arrays again; keep as much as the next chunks look back to."""
        first = max(self._last - self._lookback, 0)
        count = self._last + 1 - first
        for array in (self._observations, self._rewards, *self._columns.values()):
            array[:, :count] = array[:, first : first + count]
        for flags in (self._terminated, self._truncated):
            flags[:count] = flags[first : first + count]
        self._infos = self._infos[first:]
        self._times_s = self._times_s[first:]
        self._since = self._last = count - 1

    def _grow(self) -> None:
        former = self._capacity
        self._capacity *= 2
        self._observations = self._grown(self._observations, former)
        self._rewards = self._grown(self._rewards, former)
        self._columns = {
            name: self._grown(column, former) for name, column in self._columns.items()
        }
        self._terminated = np.concatenate([self._terminated, np.zeros_like(self._terminated)])
        self._truncated = np.concatenate([self._truncated, np.zeros_like(self._truncated)])

    def _grown(self, column: NDArray[Any], former: int) -> NDArray[Any]:
        grown = self._empty(column[:, 0])
        grown[:, :former] = column
        return grown


def _as_lists(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    return SingleAgentEpisode(
        episode.id_,
        observations=list(episode.observations.data),
        observation_space=episode.observation_space,
        infos=list(episode.infos.data),
        actions=list(episode.actions.data),
        action_space=episode.action_space,
        rewards=list(episode.rewards.data),
        extra_model_outputs={
            name: list(buffer.data) for name, buffer in episode.extra_model_outputs.items()
        },
        t_started=episode.t_started,
        len_lookback_buffer=episode.rewards.lookback,
    )
