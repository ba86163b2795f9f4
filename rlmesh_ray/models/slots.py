"""What a policy remembers, lane by lane."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.errors import PolicyError
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.protocol.messages import PredictSlot

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class _Entry(Generic[S]):
    episode_id: str
    state: S


class SlotStates(Generic[S]):
    """One state for the running episode of every lane.

    Args:
        fresh: Makes the state that an episode begins with.
    """

    def __init__(self, fresh: Callable[[], S]) -> None:
        self._fresh = fresh
        self._routes: dict[str, dict[int, _Entry[S]]] = {}

    def __len__(self) -> int:
        return sum(len(lanes) for lanes in self._routes.values())

    def of(self, rows: Rows) -> list[S]:
        """Return one state a row, made afresh where an episode begins.

        Raises:
            PolicyError: A lane occurs twice, so that the order of its rows is unknown; nothing
                has changed.
        """
        keys = [(route.route_key, slot) for route in rows.routes for slot in route.slots]
        if len({(route_key, slot.env_index) for route_key, slot in keys}) < len(keys):
            raise PolicyError(
                "a lane occurs twice in one batch, and this policy keeps state for each lane: "
                "give every slot of a Predict an env_index of its own"
            )
        return [self._state(route_key, slot) for route_key, slot in keys]

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Drop the state of one lane, or of the whole route; unknown ones are none."""
        if env_index is None:
            self._routes.pop(route_key, None)
        elif route_key in self._routes:
            lanes = self._routes[route_key]
            lanes.pop(env_index, None)
            if not lanes:
                del self._routes[route_key]

    def _state(self, route_key: str, slot: PredictSlot) -> S:
        lanes = self._routes.setdefault(route_key, {})
        entry = lanes.get(slot.env_index)
        if entry is None or slot.reset or slot.episode_id not in ("", entry.episode_id):
            entry = lanes[slot.env_index] = _Entry(slot.episode_id, self._fresh())
        return entry.state
