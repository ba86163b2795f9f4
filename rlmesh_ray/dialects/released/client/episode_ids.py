"""The episodes of a session's lanes, where the client names them; without I/O.

Requests may be under way while answers come. So there are two accounts: what the lanes' episodes
are called in what is sent next, and which of them run by what has been answered.
"""

from collections.abc import Sequence
from uuid import uuid4

from rlmesh_ray.protocol.messages import EpisodeRecord


class EpisodeIds:
    """Those of one session; ids of 32 hexadecimal digits.

    Args:
        num_lanes: Width of the session.
    """

    def __init__(self, num_lanes: int) -> None:
        # Of each id, so that no other session has it; a number makes the rest of it.
        self._prefix = uuid4().hex[:20]
        self._num_named = 0
        self.names = self._new_ids(num_lanes)
        """What a Step calls the lanes' episodes. It matters in a lane whose episode has ended:
        there it names what an autoreset begins."""
        self.tracked: tuple[str, ...] = ("",) * num_lanes
        """By lane: the episode that a Reset has begun and that has not ended; empty: none."""
        # By lane: the episode that runs by the answers so far, or that is the next to begin.
        self._running = self.names

    def new_ids(self, lanes: Sequence[int]) -> tuple[str, ...]:
        """Return new names, one for each of ``lanes``, for a Reset that is about to be sent."""
        fresh = self._new_ids(len(lanes))
        self.names = _replaced(self.names, lanes, fresh)
        return fresh

    def begin(self, lanes: Sequence[int], episode_ids: Sequence[str]) -> None:
        """Note that a Reset was answered that has begun these episodes."""
        self.tracked = _replaced(self.tracked, lanes, episode_ids)
        self._running = _replaced(self._running, lanes, episode_ids)

    def end(
        self, lanes: Sequence[int], records: Sequence[EpisodeRecord]
    ) -> tuple[EpisodeRecord, ...]:
        """Note that the episodes in ``lanes`` have ended.

        Args:
            lanes: Indices.
            records: As the endpoint tells them.

        Returns:
            Those of the tracked episodes that have ended, one each.
        """
        ended = {(lane, self.tracked[lane]) for lane in lanes if self.tracked[lane]}
        told = {(each.env_index, each.episode_id): each for each in records}
        self.tracked = _replaced(self.tracked, lanes, ("",) * len(lanes))
        # A Reset that is under way, or has failed, has named what comes next already.
        self.new_ids([lane for lane in lanes if self.names[lane] == self._running[lane]])
        self._running = _replaced(self._running, lanes, [self.names[lane] for lane in lanes])
        return tuple(each for key, each in told.items() if key in ended)

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
