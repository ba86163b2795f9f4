"""The steps of a slot's lanes as arrays, of which RLlib's episodes are made later."""

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from rlmesh_ray.rllib.runner.autoreset_emulation import NoInfos, SessionBatch

_FIRST_CAPACITY = 32


EndedEpisode = tuple[float, SingleAgentEpisode]
"""When an episode ended, by ``time.perf_counter``, and the episode, or its last chunk."""


_REWARDS = gymnasium.spaces.Box(-np.inf, np.inf, (), np.float32)
"""The space that RLlib's episodes give their rewards."""


class EpisodeFactory:
    """Makes episodes in the state in which RLlib's ``to_numpy`` leaves them.

    RLlib's own constructor determines the structure of each buffer's space several times, and
    checks every length: half of the cost of an episode of twenty steps. So it makes one episode,
    and all others are copies of that pattern with other contents.

    Args:
        observation_space: Observation space of one lane.
        action_space: Action space of one lane.
    """

    def __init__(
        self, observation_space: gymnasium.Space[Any], action_space: gymnasium.Space[Any]
    ) -> None:
        # RLlib requires one observation more than actions.
        pattern = SingleAgentEpisode(
            observations=InfiniteLookbackBuffer(np.zeros(2)),
            observation_space=observation_space,
            infos=InfiniteLookbackBuffer([{}, {}]),
            actions=InfiniteLookbackBuffer(np.zeros(1)),
            action_space=action_space,
            rewards=InfiniteLookbackBuffer(np.zeros(1), 0, _REWARDS),
        )
        self._slots = {
            name: getattr(pattern, name)
            for kind in type(pattern).__mro__
            for name in getattr(kind, "__slots__", ())
        }
        self._observations = vars(pattern.observations)
        self._infos = vars(pattern.infos)
        self._actions = vars(pattern.actions)
        self._rewards = vars(pattern.rewards)
        self._extra = vars(InfiniteLookbackBuffer(np.zeros(1)))

    def make(
        self,
        id_: str,
        *,
        observations: NDArray[Any],
        infos: list[dict[str, Any]],
        actions: NDArray[Any],
        rewards: NDArray[np.float64],
        extras: Mapping[str, NDArray[Any]],
        lookback: int,
        t_started: int,
    ) -> SingleAgentEpisode:
        """Return an episode of at least one step; it keeps the arrays as they are.

        Args:
            id_: Id of the episode.
            observations: The observations before each step and after the last one.
            infos: Likewise.
            actions: One row for each step.
            rewards: One for each step.
            extras: The module's other outputs; one row for each step.
            lookback: How many of the steps belong to the former chunk.
            t_started: Steps of the episode before this chunk.
        """
        episode = object.__new__(SingleAgentEpisode)
        slots = {
            **self._slots,
            "id_": id_,
            "observations": _buffer(self._observations, observations, lookback),
            "infos": _buffer(self._infos, infos, lookback),
            "actions": _buffer(self._actions, actions, lookback),
            "rewards": _buffer(self._rewards, rewards, lookback),
            "extra_model_outputs": {
                name: _buffer(self._extra, column, lookback) for name, column in extras.items()
            },
            "t_started": t_started,
            "t": t_started + len(rewards) - lookback,
            "_custom_data": {},
        }
        for name, value in slots.items():
            setattr(episode, name, value)
        return episode


def _buffer(pattern: dict[str, Any], data: Any, lookback: int) -> InfiniteLookbackBuffer:
    buffer = object.__new__(InfiniteLookbackBuffer)
    buffer.__dict__ = {**pattern, "data": data, "lookback": lookback}
    return buffer


class EpisodeBuffer:
    """Stores one batch for each vector step, at a cost that hardly depends on the number of lanes.

    The step after a lane's end begins its next episode (NEXT_STEP): its action belongs to neither
    episode. Episodes own their arrays.

    Args:
        observation: The first observations of all lanes: one row for each lane.
        infos: Their infos, one for each lane.
        lookback: How many earlier steps of its episode a chunk contains.
        observation_space: Observation space of one lane.
        action_space: Action space of one lane.
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
        self._spaces = (observation_space, action_space)
        self._episodes = EpisodeFactory(observation_space, action_space)
        self._capacity = _FIRST_CAPACITY
        self._since = self._last = 0
        """The positions of the latest cut and of the latest step. A step leads to the next one."""
        self._ids = [_new_id() for _ in range(self._num_lanes)]
        self._steps_before = [0] * self._num_lanes
        """Steps of the running episodes at the latest cut."""
        self._starts = [0] * self._num_lanes
        """Positions where they began, or of the latest cut. Where a lane has an end in ``_ends``,
        these three lists describe the first of its episodes that has not been made yet."""
        self._ends: deque[tuple[int, int]] = deque()
        """Lane and position of the end of each episode that has not been made yet, in time."""
        self._ended: list[EndedEpisode] = []
        self._observations = self._empty(observation)
        self._observations[:, 0] = observation
        # By step, that is, by the position that it leads to; none leads to the first position.
        self._columns: dict[str, NDArray[Any]] = {}
        self._kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {}
        self._rewards = np.zeros((self._num_lanes, self._capacity), np.float64)
        self._terminated = np.zeros((self._capacity, self._num_lanes), np.bool_)
        self._truncated = np.zeros_like(self._terminated)
        # None: no lane has infos.
        self._infos: list[Sequence[dict[str, Any]] | None] = [_kept(infos)]
        self._times_s = [time.perf_counter()]
        self.is_over: NDArray[np.bool_] = np.zeros(self._num_lanes, np.bool_)
        """By lane, whether its episode ended with the latest step. Read-only."""
        self.num_over = 0
        """Number of lanes whose episode ended with the latest step."""

    @property
    def running_ids(self) -> list[str]:
        """Ids of the running episodes; valid right after ``cut``."""
        over = self.is_over.tolist()
        return [id_ for id_, is_over in zip(self._ids, over, strict=True) if not is_over]

    def takes(self, columns: Mapping[str, Any]) -> bool:
        """Return whether ``columns`` are arrays of one row a lane, with the dtypes of former ones.

        A column whose dtype changes in the middle of an episode would get another dtype here than
        in RLlib.
        """
        if not self._kinds:
            return all(
                isinstance(column, np.ndarray) and column.shape[:1] == (self._num_lanes,)
                for column in columns.values()
            )
        if columns.keys() != self._kinds.keys():
            return False
        for name, (dtype, shape) in self._kinds.items():
            column = columns[name]
            is_array = isinstance(column, np.ndarray)
            if not is_array or column.dtype != dtype or column.shape != shape:
                return False
        return True

    def add(self, batch: SessionBatch, columns: Mapping[str, NDArray[Any]]) -> None:
        """Add a step of all lanes. Arrays have one row a lane, and are copied.

        Args:
            batch: The result of the step; observations are an array.
            columns: ``actions``, and the module's other outputs; see ``takes``.
        """
        if self._last + 1 >= self._capacity:
            self._grow()
        self._last = last = self._last + 1
        self._observations[:, last] = batch.observation
        self._rewards[:, last] = batch.rewards
        if not self._kinds:
            self._columns = {name: self._empty(column) for name, column in columns.items()}
            self._kinds = {name: (column.dtype, column.shape) for name, column in columns.items()}
        for name, column in columns.items():
            self._columns[name][:, last] = column
        goes_on = ~self.is_over
        terminated = np.logical_and(batch.terminated, goes_on, out=self._terminated[last])
        truncated = np.logical_and(batch.truncated, goes_on, out=self._truncated[last])
        self.is_over = terminated | truncated
        self.num_over = int(np.count_nonzero(self.is_over))
        if self.num_over:
            self._ends.extend((lane, last) for lane in np.flatnonzero(self.is_over).tolist())
        self._infos.append(_kept(batch.infos))
        self._times_s.append(time.perf_counter())

    def make_one(self) -> bool:
        """Make one of the episodes that have ended; return False if none is left to make.

        ``cut`` and ``hand_over`` make those that have not been made by then.
        """
        if not self._ends or self._ends[0][1] == self._last:
            return False  # episodes of the latest step may be the only ones of their lanes
        self._end(*self._ends.popleft())
        return True

    def cut(self) -> tuple[list[EndedEpisode], list[SingleAgentEpisode]]:
        ended = self._all_ended()
        chunks: list[SingleAgentEpisode] = []
        for lane, start in enumerate(self._starts):
            if start < self._last:
                chunks.append(self._episode(lane, start, self._last))
                self._steps_before[lane] += self._last - start
        self._carry_on()
        return ended, chunks

    def hand_over(self) -> tuple[list[EndedEpisode], list[SingleAgentEpisode]]:
        """Return the episodes that have ended since the latest cut, and one running for each lane.

        The latter hold lists, so that RLlib's per-item path can continue them; the buffer must not
        be used any more. A lane whose episode has just ended has it here, too, with the last
        observation and no step.
        """
        ended = self._all_ended()
        return ended, [
            self._as_lists(lane, min(start, self._last)) for lane, start in enumerate(self._starts)
        ]

    def _all_ended(self) -> list[EndedEpisode]:
        while self._ends:
            self._end(*self._ends.popleft())
        ended, self._ended = self._ended, []
        return ended

    def _end(self, lane: int, end: int) -> None:
        """Make the episode of a lane that ended at a position, unless a cut has returned it."""
        if end > self._since:
            episode = self._episode(lane, self._starts[lane], end)
            episode.is_terminated = bool(self._terminated[end, lane])
            episode.is_truncated = bool(self._truncated[end, lane])
            self._ended.append((self._times_s[end], episode))
        if end < self._last:
            self._ids[lane] = _new_id()
            self._steps_before[lane] = 0
        self._starts[lane] = end + 1

    def _episode(self, lane: int, start: int, end: int) -> SingleAgentEpisode:
        """Return the part of a lane's episode between two positions; they are not the same."""
        parts, columns, lookback = self._parts(lane, start, end)
        episode = self._episodes.make(
            self._ids[lane],
            **parts,
            actions=columns.pop(Columns.ACTIONS),
            extras=columns,
            lookback=lookback,
            t_started=self._steps_before[lane],
        )
        episode._start_time = self._times_s[start]
        episode._last_step_time = self._times_s[end]
        return episode

    def _as_lists(self, lane: int, start: int) -> SingleAgentEpisode:
        """Return the running part of a lane's episode, for more steps; it may have none yet."""
        parts, columns, lookback = self._parts(lane, start, self._last)
        lists = {name: list(column) for name, column in columns.items()}
        episode = SingleAgentEpisode(
            self._ids[lane],
            **{name: list(part) for name, part in parts.items()},
            observation_space=self._spaces[0],
            action_space=self._spaces[1],
            actions=lists.pop(Columns.ACTIONS, []),
            extra_model_outputs=lists,
            t_started=self._steps_before[lane],
            len_lookback_buffer=lookback,
        )
        episode._start_time = self._times_s[start]
        episode._last_step_time = self._times_s[self._last]
        return episode

    def _parts(
        self, lane: int, start: int, end: int
    ) -> tuple[dict[str, Any], dict[str, NDArray[Any]], int]:
        """Return what episodes are made of, between two positions.

        Returns:
            Observations, infos and rewards; the columns of the steps; and how many of the steps
            belong to the former chunk.
        """
        lookback = min(self._lookback, self._steps_before[lane], start)
        first = start - lookback
        # Copies: a view would keep the arrays of all lanes alive.
        parts = {
            "observations": self._observations[lane, first : end + 1].copy(),
            "infos": [
                {} if by_lane is None else by_lane[lane] for by_lane in self._infos[first : end + 1]
            ],
            "rewards": self._rewards[lane, first + 1 : end + 1].copy(),
        }
        columns = {
            name: column[lane, first + 1 : end + 1].copy() for name, column in self._columns.items()
        }
        return parts, columns, lookback

    # --- arrays -----------------------------------------------------------------------------

    def _empty(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return an array for such rows at each position: ``(num_lanes, capacity, *shape)``."""
        return np.empty((self._num_lanes, self._capacity, *rows.shape[1:]), rows.dtype)

    def _carry_on(self) -> None:
        """Reuse the arrays; keep the steps that the next chunks look back to."""
        first = max(self._last - self._lookback, 0)
        count = self._last + 1 - first
        for array in (self._observations, self._rewards, *self._columns.values()):
            array[:, :count] = array[:, first : first + count]
        for flags in (self._terminated, self._truncated):
            flags[:count] = flags[first : first + count]
        self._infos = self._infos[first:]
        self._times_s = self._times_s[first:]
        self._since = self._last = last = count - 1
        self._starts = [last] * self._num_lanes
        # The next episodes of their lanes have no ids yet.
        self._ends.extend((lane, last) for lane in np.flatnonzero(self.is_over).tolist())

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


def _kept(infos: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]] | None:
    return None if isinstance(infos, NoInfos) else infos


def _new_id() -> str:
    return uuid.uuid4().hex
