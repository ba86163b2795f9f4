"""Episode accounting: what happens in each lane between its Reset and its end.

Rule 1: an episode is tracked from an explicit Reset until its lane reports terminated or
truncated, and only then; what an autoreset starts is not tracked (edition 2026.06,
"Episode Accounting").
Rule 2: an episode's record is given out exactly once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import EpisodeRecord, Infos


@dataclass(slots=True)
class _Episode:
    episode_id: str
    seed: int | None
    start_ns: int
    step_count: int = 0
    cumulative_reward: float = 0.0


class EpisodeLedger:
    """The tracked episodes of one session, by lane.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Mints an episode id; never the same one twice.
    """

    def __init__(self, num_lanes: int, new_id: Callable[[], str]) -> None:
        self._tracked: list[_Episode | None] = [None] * num_lanes
        self._new_id = new_id

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return tuple(episode.episode_id if episode else "" for episode in self._tracked)

    def begin(self, lanes: Sequence[int], seeds: Sequence[int], now_ns: int) -> None:
        """Track a new episode in each of ``lanes``; one that was running there is forgotten.

        Args:
            lanes: Indices.
            seeds: Empty, or one for each of ``lanes``.
            now_ns: Time since the epoch.
        """
        for position, lane in enumerate(lanes):
            seed = seeds[position] if seeds else None
            self._tracked[lane] = _Episode(self._new_id(), seed, now_ns)

    def step(
        self,
        rewards: Sequence[float],
        terminated: Sequence[int],
        truncated: Sequence[int],
        final_infos: Mapping[int, Infos],
        now_ns: int,
    ) -> tuple[EpisodeRecord, ...]:
        """Account one vector step; return the episodes that it ended.

        Args:
            rewards: One a lane.
            terminated: One flag a lane.
            truncated: One flag a lane.
            final_infos: Last infos of the lanes that ended.
            now_ns: Time since the epoch.
        """
        completed = []
        for lane, episode in enumerate(self._tracked):
            if episode is None:
                continue
            episode.step_count += 1
            episode.cumulative_reward += rewards[lane]
            if terminated[lane] or truncated[lane]:
                flags = (bool(terminated[lane]), bool(truncated[lane]))
                completed.append(_record(lane, episode, flags, final_infos.get(lane, {}), now_ns))
                self._tracked[lane] = None
        return tuple(completed)

    def finalize(self, now_ns: int) -> tuple[EpisodeRecord, ...]:
        """Stop tracking everywhere; return what was cut off, neither terminated nor truncated."""
        cut_off = tuple(
            _record(lane, episode, (False, False), {}, now_ns)
            for lane, episode in enumerate(self._tracked)
            if episode is not None
        )
        self._tracked = [None] * len(self._tracked)
        return cut_off


def _record(
    lane: int, episode: _Episode, flags: tuple[bool, bool], final_info: Infos, now_ns: int
) -> EpisodeRecord:
    terminated, truncated = flags
    return EpisodeRecord(
        episode_id=episode.episode_id,
        env_index=lane,
        step_count=episode.step_count,
        cumulative_reward=episode.cumulative_reward,
        terminated=terminated,
        truncated=truncated,
        start_timestamp_ns=episode.start_ns,
        end_timestamp_ns=now_ns,
        seed=episode.seed,
        final_info=final_info,
    )
