"""Lanes of a model route of ``rlmesh-wire-v1``: one for each episode that runs.

The dialect names neither a route's width nor a row's lane, only the episode of each row. An episode
gets a lane with its first row, and keeps it until the client reports its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh_ray.errors import CapacityError, CodecError
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.protocol.model_session import check_id_lengths

MAX_EPISODES = 2**16
"""Episodes that one session may have at a time. A policy may keep a state for each of them, and
their number would grow without bound if a client never reported an end."""


class EpisodeLimit:
    """Counts the episodes that have a lane, over all routes of a session.

    Args:
        limit: How many are allowed.
    """

    def __init__(self, limit: int = MAX_EPISODES) -> None:
        self.count = 0
        self._limit = limit

    def add(self, count: int) -> None:
        """Count ``count`` more. Raises CapacityError when they are too many."""
        if self.count + count > self._limit:
            raise CapacityError(
                f"the session would have {self.count + count} episodes, and {self._limit} are the "
                "limit: report the ended ones (reset_adapter), or open another session"
            )
        self.count += count


@dataclass(slots=True)
class _EpisodeLane:
    lane: int
    has_begun: bool = False
    """Whether the policy has chosen an action for the episode."""


class EpisodeLanes:
    """A lane for each episode that runs; freed lanes are used again.

    A row is the first of its episode until a row of it has been answered with actions.

    Args:
        held: Counts the episodes of all routes of the session.
    """

    num_reserved = 0

    def __init__(self, held: EpisodeLimit) -> None:
        self._held = held
        self._lanes: dict[str, _EpisodeLane] = {}
        self._free: list[int] = []

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Set the lane of each row, and whether it is the first of its episode."""
        episodes = [slot.episode_id for slot in slots]
        _check_episodes(episodes)
        new = [episode for episode in episodes if episode not in self._lanes]
        check_id_lengths(new)
        self._held.add(len(new))
        for episode in new:
            # Without a gap in them, there are as many lanes as episodes.
            self._lanes[episode] = _EpisodeLane(
                self._free.pop() if self._free else len(self._lanes)
            )
        return tuple(self._assigned(slot) for slot in slots)

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Make the next row of an episode its first again, if the failed row was that."""
        for slot in slots:
            self._lanes[slot.episode_id].has_begun = not slot.reset

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of those episodes that are known, each once."""
        return [self._lanes[episode].lane for episode in self._known(episode_ids)]

    def free(self, episode_ids: Sequence[str]) -> None:
        """Free the lanes of episodes, whose states the policy has dropped."""
        known = self._known(episode_ids)
        self._free += [self._lanes.pop(episode).lane for episode in known]
        self._held.count -= len(known)

    def clear(self) -> None:
        """Free all lanes, since the policy has dropped the states of the route."""
        self.free(tuple(self._lanes))

    def _known(self, episode_ids: Sequence[str]) -> list[str]:
        return [episode for episode in dict.fromkeys(episode_ids) if episode in self._lanes]

    def _assigned(self, slot: PredictSlot) -> PredictSlot:
        episode_lane = self._lanes[slot.episode_id]
        is_first, episode_lane.has_begun = not episode_lane.has_begun, True
        return PredictSlot(episode_lane.lane, slot.episode_id, slot.step, is_first)


def _check_episodes(episodes: Sequence[str]) -> None:
    if not episodes:
        raise CodecError("predict names no episodes; give episode_info for each row")
    if "" in episodes:
        raise CodecError("predict has an empty episode_id; each row needs the id of its episode")
    if len(set(episodes)) < len(episodes):
        raise CodecError("predict names an episode twice; each row needs one of its own")
