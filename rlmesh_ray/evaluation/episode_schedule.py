"""Schedule of episodes and lanes; without I/O, clock or lock.

Rule 1: every index is finished exactly once. Rule 2: a lost index waits again and may be taken
by any lane. Rule 3: the smallest waiting index is taken first, so that no lane's speed decides
which episodes count.
"""

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable

from rlmesh_ray.errors import LocalProtocolError


class Schedule:
    """The episodes of one evaluation, by index.

    A session is a group of lanes that are lost together. The key of a lost session must never be
    used again: its late reports are refused.

    Args:
        indices: Distinct indices of the episodes.
    """

    def __init__(self, indices: Iterable[int]) -> None:
        self._waiting = sorted(indices)
        self._running: dict[Hashable, dict[int, int]] = {}
        self._num_left = len(self._waiting)
        self._interruptions: Counter[int] = Counter()

    @property
    def num_waiting(self) -> int:
        """Number of indices that no lane runs."""
        return len(self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether all are finished."""
        return self._num_left == 0

    def interruptions(self, index: int) -> int:
        """Return how often ``index`` was lost after it had begun."""
        return self._interruptions[index]

    def take(self, session: Hashable, lane: int) -> int | None:
        """Assign an index to ``lane`` of ``session``; None where none waits.

        Raises:
            LocalProtocolError: The lane still runs another one.
        """
        running = self._running.setdefault(session, {})
        if lane in running:
            raise LocalProtocolError(f"lane {lane} still runs episode {running[lane]}")
        if not self._waiting:
            return None
        running[lane] = heapq.heappop(self._waiting)
        return running[lane]

    def finish(self, session: Hashable, lane: int) -> int:
        """Record that ``lane`` has finished its episode; return the index.

        Raises:
            LocalProtocolError: The lane runs no episode, or its session is lost.
        """
        index = self._running.get(session, {}).pop(lane, None)
        if index is None:
            raise LocalProtocolError(f"lane {lane} runs no episode that could end")
        self._num_left -= 1
        return index

    def lose(self, session: Hashable, *, has_begun: bool = True) -> tuple[int, ...]:
        """Reschedule the episodes of a lost session; return their indices, ascending.

        Args:
            session: Key of the session, which may run no episode.
            has_begun: Whether its episodes had begun and were interrupted.
        """
        lost = tuple(sorted(self._running.pop(session, {}).values()))
        for index in lost:
            heapq.heappush(self._waiting, index)
            self._interruptions[index] += has_begun
        return lost
