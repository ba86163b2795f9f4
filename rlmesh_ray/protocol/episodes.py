"""Episode accounting: ids, counts and records of the tracked episodes. Sans-I/O.

Rule 1: an episode is tracked from ``begin`` until its lane reports terminated or truncated. In
edition 2026.06 ("Episode Accounting") only an explicit Reset begins one; an episode that an
autoreset starts is not tracked.
Rule 2: an episode's record is returned exactly once.
Rule 3: only the party that steps the lanes counts. The tracker knows the episode of each lane, and
reads the counts when it makes a record.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmesh_ray.protocol.messages import EpisodeRecord, Infos

MAX_ID_CHARACTERS = 2**10
"""Longest id that a client may give an episode or a route, which keeps it while it runs."""


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """Id, seed and start time of an episode."""

    episode_id: str
    seed: int | None
    start_ns: int


class EpisodeCounters(Protocol):
    """Counts of the tracked episodes at one moment: one entry for each lane, in lists or arrays."""

    @property
    def is_tracked(self) -> Any:
        """Whether the lane's episode is tracked."""

    @property
    def step_counts(self) -> Any:
        """Steps of the lane's episode, or of its last one."""

    @property
    def cumulative_rewards(self) -> Any:
        """Sum of the rewards of that episode."""


class EpisodeCounterSource(Protocol):
    """The counts before and after the last request."""

    @property
    def now(self) -> EpisodeCounters:
        """The counts after the last request."""

    @property
    def before(self) -> EpisodeCounters:
        """The counts before the last request."""


class EpisodeTracker:
    """The tracked episodes of one session, by lane.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Returns a new episode id, never the same one twice.
        counters: The counts of the lanes.
    """

    def __init__(
        self, num_lanes: int, new_id: Callable[[], str], counters: EpisodeCounterSource
    ) -> None:
        # The latest episode of each lane, until its record has been returned.
        self._episodes: list[EpisodeStart | None] = [None] * num_lanes
        self._all_lanes = range(num_lanes)
        self.counters = counters
        self._new_id = new_id

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return tuple(
            episode.episode_id if is_tracked and episode else ""
            for episode, is_tracked in zip(
                self._episodes, self.counters.now.is_tracked, strict=True
            )
        )

    @property
    def episodes(self) -> tuple[EpisodeStart | None, ...]:
        """The latest episode of each lane; None: its record has been returned, or none began."""
        return tuple(self._episodes)

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        """Replace the episodes by the ``episodes`` of another tracker."""
        self._episodes = list(episodes)

    def begin(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int],
        now_ns: int,
        episode_ids: Sequence[str] = (),
    ) -> None:
        """Begin an episode in each of ``lanes``; one that was running is forgotten.

        Args:
            lanes: Lane indices.
            seeds: Empty, or one for each of ``lanes``.
            now_ns: Time since the epoch.
            episode_ids: Ids of the new episodes, in the order of ``lanes``; missing and empty ones
                are created.
        """
        for position, lane in enumerate(lanes):
            seed = seeds[position] if seeds else None
            given = episode_ids[position] if position < len(episode_ids) else ""
            self._episodes[lane] = EpisodeStart(given or self._new_id(), seed, now_ns)

    def completed(
        self,
        terminated: Sequence[int],
        truncated: Sequence[int],
        final_infos: Mapping[int, Infos],
        now_ns: int,
        lanes: Sequence[int] = (),
    ) -> tuple[EpisodeRecord, ...]:
        """Return the records of the episodes that the last request, a step, has ended.

        Args:
            terminated: One flag for each stepped lane.
            truncated: One flag for each stepped lane.
            final_infos: Last infos of the lanes that ended, by lane.
            now_ns: Time since the epoch.
            lanes: The stepped lanes; empty: all.
        """
        now, before = self.counters.now, self.counters.before
        records = []
        for position, lane in enumerate(lanes or self._all_lanes):
            if not (terminated[position] or truncated[position]):
                continue
            if before.is_tracked[lane] and not now.is_tracked[lane]:
                flags = (bool(terminated[position]), bool(truncated[position]))
                records += self._take_record(lane, now, flags, final_infos.get(lane, {}), now_ns)
        return tuple(records)

    def interrupt(
        self,
        lanes: Iterable[int],
        now_ns: int,
        *,
        is_truncated: bool = False,
        is_before: bool = False,
    ) -> tuple[EpisodeRecord, ...]:
        """Stop tracking in ``lanes``; return the records of the running episodes.

        Their final infos are empty.

        Args:
            lanes: Lane indices.
            now_ns: Time since the epoch.
            is_truncated: The records' ``truncated`` flag.
            is_before: Whether the counts before the last request apply: it ended the episodes.
        """
        counts = self.counters.before if is_before else self.counters.now
        records = []
        for lane in lanes:
            if counts.is_tracked[lane]:
                records += self._take_record(lane, counts, (False, is_truncated), {}, now_ns)
            self._episodes[lane] = None
        return tuple(records)

    def finalize(self, now_ns: int) -> tuple[EpisodeRecord, ...]:
        """Stop tracking in all lanes; return the records, neither terminated nor truncated."""
        return self.interrupt(self._all_lanes, now_ns)

    def _take_record(
        self,
        lane: int,
        counts: EpisodeCounters,
        flags: tuple[bool, bool],
        final_info: Infos,
        now_ns: int,
    ) -> list[EpisodeRecord]:
        """Return the record of a lane's episode; no record the second time."""
        episode, self._episodes[lane] = self._episodes[lane], None
        if episode is None:
            return []
        terminated, truncated = flags
        record = EpisodeRecord(
            episode_id=episode.episode_id,
            env_index=lane,
            step_count=int(counts.step_counts[lane]),
            cumulative_reward=float(counts.cumulative_rewards[lane]),
            terminated=terminated,
            truncated=truncated,
            start_timestamp_ns=episode.start_ns,
            end_timestamp_ns=now_ns,
            seed=episode.seed,
            final_info=final_info,
        )
        return [record]
