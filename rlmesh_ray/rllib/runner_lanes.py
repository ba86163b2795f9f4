"""A runner's lanes: the slots that they come in, and what is remembered of each between steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlmesh_ray.rllib.arrivals import Arrivals
from rlmesh_ray.rllib.lane_slot import Arrival, Group, LaneSlot
from rlmesh_ray.rllib.opening import open_sessions
from rlmesh_ray.rllib.plan import RolloutPlan
from rlmesh_ray.rllib.seats import Seats


@dataclass(slots=True)
class Lanes:
    """What the runner remembers of one slot's lanes between two steps."""

    slot: LaneSlot
    sessions: range
    """Numbers of the slot's sessions among the runner's."""
    shared_data: dict[str, Any]
    """RLlib's connectors hand things to each other in this, between one step's two pipelines."""
    to_module: Any = None
    """The next forward pass's input."""
    actions: Any = None
    """As the module gave them, for the episodes; what the environment got may differ."""
    extras: dict[str, Any] | None = None
    """Everything else that the module gave, one row a lane."""
    num_asked: int = 0
    """Timesteps that are on their way."""


def lanes_of(
    plan: RolloutPlan,
    seats: Seats,
    arrivals: Arrivals[Arrival],
    group_class: Callable[..., Group],
) -> list[Lanes]:
    """Return the lanes of a runner, of which nothing is open yet.

    Args:
        plan: What they are like.
        seats: Of all the runner's sessions: one slot each, or one for all in lockstep.
        arrivals: Where the slots' results go.
        group_class: Makes one group of open sessions and their contract.
    """
    total = len(seats.endpoints)
    size = total if plan.lockstep else 1
    width = plan.contract.num_envs
    found = []
    for first in range(0, total, size):
        sessions = range(first, first + size)
        opening = partial(_open_group, group_class, plan, seats, sessions)
        slot = LaneSlot(range(first * width, sessions.stop * width), opening, arrivals)
        found.append(Lanes(slot, sessions, {}))
    return found


def call_lanes(
    all_lanes: Sequence[Lanes], name: str, arguments: tuple[object, ...]
) -> tuple[Any, ...]:
    """Call into every lane; see ``LaneSlot.call``."""
    return tuple(result for lanes in all_lanes for result in lanes.slot.call(name, arguments))


def close_lanes(all_lanes: Sequence[Lanes], arrivals: Arrivals[Arrival], seats: Seats) -> None:
    """End all sessions and give their seats back. Idempotent."""
    for lanes in all_lanes:
        lanes.slot.close()
    arrivals.close()
    seats.release()


def _open_group(
    group_class: Callable[..., Group], plan: RolloutPlan, seats: Seats, sessions: Sequence[int]
) -> Group:
    return group_class(open_sessions(plan, seats, sessions), plan.contract)
