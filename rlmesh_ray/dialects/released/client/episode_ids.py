"""Ids of the episodes of a session's lanes, which the client mints; without I/O.

Requests may be in flight while answers come. So there are two states: the ids for the next request,
and the episodes that run according to the answers.
"""

from collections.abc import Sequence
from uuid import uuid4

from rlmesh_ray.protocol.messages import EpisodeRecord


class EpisodeIds:
    """The ids of one session, of 32 hexadecimal digits.

    Args:
        num_lanes: Width of the session.
    """

    def __init__(self, num_lanes: int) -> None:
        # Of each id, so that no other session has it; a number is the rest of it.
        self._prefix = uuid4().hex[:20]
        self._num_named = 0
        self.names = self._new_ids(num_lanes)
        """The lanes' ids in a Step. In a lane whose episode has ended, it is the id of the episode
        that an autoreset begins."""
        self.tracked: tuple[str, ...] = ("",) * num_lanes
        """By lane: the episode that a Reset has begun and that has not ended; empty: none."""
        # By lane: the episode that runs according to the answers, or that begins next.
        self._running = self.names

    def new_ids(self, lanes: Sequence[int]) -> tuple[str, ...]:
        """Return new ids, one for each of ``lanes``, for a Reset that is about to be sent."""
        fresh = self._new_ids(len(lanes))
        self.names = _replaced(self.names, lanes, fresh)
        return fresh

    def begin(self, lanes: Sequence[int], episode_ids: Sequence[str]) -> None:
        """Handle the answer to a Reset that has begun these episodes."""
        self.tracked = _replaced(self.tracked, lanes, episode_ids)
        self._running = _replaced(self._running, lanes, episode_ids)

    def end(
        self, lanes: Sequence[int], records: Sequence[EpisodeRecord]
    ) -> tuple[EpisodeRecord, ...]:
        """Handle the end of the episodes in ``lanes``.

        Args:
            lanes: Indices.
            records: The endpoint's.

        Returns:
            One record for each of the tracked episodes that have ended.
        """
        ended = {(lane, self.tracked[lane]) for lane in lanes if self.tracked[lane]}
        found = {(each.env_index, each.episode_id): each for each in records}
        self.tracked = _replaced(self.tracked, lanes, ("",) * len(lanes))
        # A Reset that is in flight or has failed has set the id of the next episode.
        self.new_ids([lane for lane in lanes if self.names[lane] == self._running[lane]])
        self._running = _replaced(self._running, lanes, [self.names[lane] for lane in lanes])
        return tuple(each for key, each in found.items() if key in ended)

    def _new_ids(self, count: int) -> tuple[str, ...]:
        first, self._num_named = self._num_named, self._num_named + count
        return tuple(f"{self._prefix}{number:012x}" for number in range(first, first + count))


def _replaced(
    values: tuple[str, ...], lanes: Sequence[int], others: Sequence[str]
) -> tuple[str, ...]:
    changed = list(values)
    for lane, other in zip(lanes, others, strict=True):
        changed[lane] = other
    return tuple(changed)
