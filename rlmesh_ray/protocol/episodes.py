"""Episode accounting: what happens in each lane between its Reset and its end.

Rule 1: an episode is tracked from ``begin`` until its lane reports terminated or truncated, and
only then. After edition 2026.06 ("Episode Accounting") only an explicit Reset begins one; what an
autoreset starts is not tracked.
Rule 2: an episode's record is given out exactly once.
Rule 3: what steps change is in the tally and nowhere else, so that two processes can keep one
account: whichever answers a step writes to it, and only one of them does at a time.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rlmesh_ray.protocol.messages import EpisodeRecord, Infos

T = TypeVar("T")

MAX_ID_CHARACTERS = 2**10
"""Of the name that a client gives an episode, or a route: it is kept as long as that runs."""


class Counters(Protocol[T]):
    """One value a lane: a list, or a view of memory."""

    def __iter__(self) -> Iterator[T]: ...
    def __getitem__(self, lane: int, /) -> T: ...
    def __setitem__(self, lane: int, value: T, /) -> None: ...


@dataclass(frozen=True, slots=True)
class Episode:
    """What is known of an episode from its start."""

    episode_id: str
    seed: int | None
    start_ns: int


@dataclass(frozen=True, slots=True)
class Tally:
    """What steps change; one entry a lane everywhere."""

    is_tracked: Counters[int]
    step_counts: Counters[int]
    cumulative_rewards: Counters[float]

    @classmethod
    def empty(cls, num_lanes: int) -> "Tally":
        """Return one for this process alone."""
        return cls([0] * num_lanes, [0] * num_lanes, [0.0] * num_lanes)


class EpisodeLedger:
    """The tracked episodes of one session, by lane.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Mints an episode id; never the same one twice.
    """

    def __init__(self, num_lanes: int, new_id: Callable[[], str]) -> None:
        # By lane: the latest; it may have ended.
        self._episodes: list[Episode] = [Episode("", None, 0)] * num_lanes
        self._all_lanes = range(num_lanes)
        self._tally = Tally.empty(num_lanes)
        self._new_id = new_id

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return tuple(
            episode.episode_id if is_tracked else ""
            for episode, is_tracked in zip(self._episodes, self._tally.is_tracked, strict=True)
        )

    @property
    def is_tracking(self) -> bool:
        """Whether any lane has a tracked episode."""
        return any(self._tally.is_tracked)

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The latest of each lane, whether it is still tracked or not."""
        return tuple(self._episodes)

    def share(self, tally: Tally) -> None:
        """Go on in ``tally``, which gets what this ledger has counted so far."""
        _copy(self._tally.step_counts, tally.step_counts)
        _copy(self._tally.cumulative_rewards, tally.cumulative_rewards)
        _copy(self._tally.is_tracked, tally.is_tracked)
        self._tally = tally

    def join(self, tally: Tally, episodes: Sequence[Episode]) -> None:
        """Go on where the ledger that shares ``tally`` stands.

        Args:
            tally: With its counts.
            episodes: That ledger's.
        """
        self._tally = tally
        self._episodes = list(episodes)

    def begin(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int],
        now_ns: int,
        episode_ids: Sequence[str] = (),
    ) -> None:
        """Track a new episode in each of ``lanes``; one that was running there is forgotten.

        Args:
            lanes: Indices.
            seeds: Empty, or one for each of ``lanes``.
            now_ns: Time since the epoch.
            episode_ids: Of the new ones, in the order of ``lanes``; those that are missing or empty
                are minted.
        """
        tally = self._tally
        for position, lane in enumerate(lanes):
            seed = seeds[position] if seeds else None
            given = episode_ids[position] if position < len(episode_ids) else ""
            self._episodes[lane] = Episode(given or self._new_id(), seed, now_ns)
            tally.step_counts[lane], tally.cumulative_rewards[lane] = 0, 0.0
            tally.is_tracked[lane] = 1

    def step(
        self,
        rewards: Sequence[float],
        terminated: Sequence[int],
        truncated: Sequence[int],
        final_infos: Mapping[int, Infos],
        now_ns: int,
        lanes: Sequence[int] = (),
    ) -> tuple[EpisodeRecord, ...]:
        """Account one vector step; return the episodes that it ended.

        Args:
            rewards: One a lane.
            terminated: One flag a lane.
            truncated: One flag a lane.
            final_infos: Last infos of the lanes that ended, by lane.
            now_ns: Time since the epoch.
            lanes: Those that were stepped, if not all: there is one reward and flag for each.
        """
        tally, completed = self._tally, []
        is_tracked, step_counts = tally.is_tracked, tally.step_counts
        cumulative_rewards = tally.cumulative_rewards
        for position, lane in enumerate(lanes or self._all_lanes):
            if not is_tracked[lane]:
                continue
            step_counts[lane] += 1
            cumulative_rewards[lane] += rewards[position]
            if terminated[position] or truncated[position]:
                flags = (bool(terminated[position]), bool(truncated[position]))
                completed.append(self._record(lane, flags, final_infos.get(lane, {}), now_ns))
                is_tracked[lane] = 0
        return tuple(completed)

    def cut_off(
        self, lanes: Iterable[int], now_ns: int, *, is_truncated: bool = False
    ) -> tuple[EpisodeRecord, ...]:
        """Stop tracking in ``lanes``; return what ran there, with nothing in its final info.

        Args:
            lanes: Indices.
            now_ns: Time since the epoch.
            is_truncated: Whether that counts as truncation.
        """
        cut_off = []
        for lane in lanes:
            if self._tally.is_tracked[lane]:
                cut_off.append(self._record(lane, (False, is_truncated), {}, now_ns))
                self._tally.is_tracked[lane] = 0
        return tuple(cut_off)

    def finalize(self, now_ns: int) -> tuple[EpisodeRecord, ...]:
        """Stop tracking everywhere; return what was cut off, neither terminated nor truncated."""
        return self.cut_off(self._all_lanes, now_ns)

    def _record(
        self, lane: int, flags: tuple[bool, bool], final_info: Infos, now_ns: int
    ) -> EpisodeRecord:
        terminated, truncated = flags
        episode = self._episodes[lane]
        return EpisodeRecord(
            episode_id=episode.episode_id,
            env_index=lane,
            step_count=self._tally.step_counts[lane],
            cumulative_reward=self._tally.cumulative_rewards[lane],
            terminated=terminated,
            truncated=truncated,
            start_timestamp_ns=episode.start_ns,
            end_timestamp_ns=now_ns,
            seed=episode.seed,
            final_info=final_info,
        )


class ReplacedEpisodes:
    """Records of episodes that Resets have ended, until a Step fetches them.

    Args:
        max_records: How many to keep; of more the oldest are dropped, since nobody who goes on
            resetting asks for them.
    """

    def __init__(self, max_records: int) -> None:
        self._records: deque[EpisodeRecord] = deque(maxlen=max_records)

    def add(self, records: Iterable[EpisodeRecord]) -> None:
        """Keep ``records``, in the order of the Resets."""
        self._records.extend(records)

    def take(self, lanes: Collection[int]) -> tuple[EpisodeRecord, ...]:
        """Give out those of ``lanes``, in order."""
        if not self._records:
            return ()
        own = set(lanes)
        taken = tuple(record for record in self._records if record.env_index in own)
        kept = [record for record in self._records if record.env_index not in own]
        self._records.clear()
        self._records.extend(kept)
        return taken


def _copy(source: Counters[T], target: Counters[T]) -> None:
    for lane, value in enumerate(source):
        target[lane] = value
