"""The slots of a runner, and the state of each between two steps."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlmesh_ray.rllib.config.rollout_plan import RolloutPlan
from rlmesh_ray.rllib.runner.assignment_requests import SessionAssignments
from rlmesh_ray.rllib.runner.completion_queue import CompletionQueue
from rlmesh_ray.rllib.runner.session_setup import open_sessions
from rlmesh_ray.rllib.runner.slot import Slot, SlotGroup, SlotResult


@dataclass(slots=True)
class SlotState:
    """The state of one slot's lanes between two steps."""

    slot: Slot
    sessions: range
    """Numbers of the slot's sessions among those of the runner."""
    shared_data: dict[str, Any]
    """RLlib's connectors exchange data in this, between the two pipelines of one step."""
    to_module: Any = None
    """The next forward pass's input."""
    actions: Any = None
    """The module's actions, for the episodes; those for the environment may differ."""
    extras: dict[str, Any] | None = None
    """The module's other outputs, one row for each lane."""
    num_in_flight: int = 0
    """Timesteps that were requested and have not arrived."""


def slots_of(
    plan: RolloutPlan,
    assignments: SessionAssignments,
    completions: CompletionQueue[SlotResult],
    group_class: Callable[..., SlotGroup],
) -> list[SlotState]:
    """Return the slots of a runner; their sessions are not open yet.

    Args:
        plan: The plan of the runner's config.
        assignments: Where the runner's sessions are opened: one slot for each session, or one for
            all of them in lockstep.
        completions: Gets the slots' results.
        group_class: Makes one group of open sessions and their contract.
    """
    total = len(assignments.endpoints)
    size = total if plan.lockstep else 1
    width = plan.contract.num_envs
    found = []
    for first in range(0, total, size):
        sessions = range(first, first + size)
        opening = partial(_open_group, group_class, plan, assignments, sessions)
        slot = Slot(range(first * width, sessions.stop * width), opening, completions)
        found.append(SlotState(slot, sessions, {}))
    return found


def close_slots(
    slots: Sequence[SlotState],
    completions: CompletionQueue[SlotResult],
    assignments: SessionAssignments,
) -> None:
    """End all sessions and release their assignments. Idempotent."""
    for state in slots:
        state.slot.close()
    completions.close()
    assignments.release()


def _open_group(
    group_class: Callable[..., SlotGroup],
    plan: RolloutPlan,
    assignments: SessionAssignments,
    sessions: Sequence[int],
) -> SlotGroup:
    return group_class(open_sessions(plan, assignments, sessions), plan.contract)
