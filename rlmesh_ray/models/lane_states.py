"""The states that a policy keeps for lanes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.messages import PredictSlot

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _SlotState(Generic[S]):
    episode_id: str
    state: S


class EpisodeStates(Generic[S]):
    """One state for the running episode of every lane.

    Args:
        fresh: Makes the initial state of an episode.
        freed: Called with each state that is dropped.
    """

    def __init__(
        self, fresh: Callable[[], S], freed: Callable[[S], object] = lambda state: None
    ) -> None:
        self._fresh = fresh
        self._freed = freed
        self._routes: dict[str, dict[int, _SlotState[S]]] = {}

    def __len__(self) -> int:
        return sum(len(lanes) for lanes in self._routes.values())

    def of(self, rows: Rows) -> list[S]:
        """Return one state for each row; a new one where an episode begins.

        Raises:
            PolicyError: A lane occurs twice, so that the order of its rows is unknown; nothing
                has changed.
        """
        self._require_distinct_lanes(rows)
        states: list[S] = []
        for route in rows.routes:
            lanes = self._routes.setdefault(route.route_key, {}) if route.slots else {}
            for slot in route.slots:
                entry = lanes.get(slot.env_index)
                if entry is None or slot.reset or slot.episode_id not in ("", entry.episode_id):
                    entry = self._begin(lanes, slot)
                states.append(entry.state)
        return states

    def forget(self, route_key: str, env_index: int | None) -> None:
        lanes = self._routes.get(route_key, {})
        for index in list(lanes) if env_index is None else [env_index]:
            if index in lanes:
                self._freed(lanes.pop(index).state)
        if not lanes:
            self._routes.pop(route_key, None)

    def _begin(self, lanes: dict[int, _SlotState[S]], slot: PredictSlot) -> _SlotState[S]:
        if slot.env_index in lanes:
            self._freed(lanes[slot.env_index].state)
        entry = lanes[slot.env_index] = _SlotState(slot.episode_id, self._fresh())
        return entry

    def _require_distinct_lanes(self, rows: Rows) -> None:
        seen: dict[str, set[int]] = {}
        for route in rows.routes:
            lanes = seen.setdefault(route.route_key, set())
            lanes.update([slot.env_index for slot in route.slots])
        if sum(map(len, seen.values())) < rows.num_rows:
            raise PolicyError(
                "a lane occurs twice in one batch, and this policy keeps state for each lane: "
                "give every slot of a Predict an env_index of its own"
            )
