"""The episodes that a route's rows belong to, as released models know them; without I/O.

Released models know rows by their episodes alone, and want each named and none twice in a batch.
Callers of this package know them by lanes, and may name episodes or not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

from rlmesh_ray.protocol.adapter_messages import RowEpisode
from rlmesh_ray.protocol.messages import PredictSlot


@dataclass(frozen=True, slots=True)
class _Episode:
    given: str
    """By the caller; may be empty."""
    name: str
    """Said to the model. A server keeps the episodes of all its routes and sessions together: so
    it is nobody else's there, and only begins with what was given."""


class RowEpisodes:
    """Those of one route."""

    def __init__(self) -> None:
        self._by_lane: dict[int, _Episode] = {}

    def of(self, rows: Sequence[PredictSlot]) -> tuple[tuple[RowEpisode, ...], tuple[str, ...]]:
        """Return the episodes of ``rows``, and those that they have replaced.

        A lane's episode lasts until a row is the first of another one, or names another one.
        """
        named: list[RowEpisode] = []
        replaced: list[str] = []
        for row in rows:
            episode = self._by_lane.get(row.env_index)
            if episode is None or row.reset or row.episode_id != episode.given:
                if episode is not None:
                    replaced.append(episode.name)
                episode = self._by_lane[row.env_index] = _new_episode(row.episode_id)
            named.append(RowEpisode(episode.name))
        return tuple(named), tuple(replaced)


def _new_episode(given: str) -> _Episode:
    own = uuid4().hex
    return _Episode(given, f"{given}-{own}" if given else own)
