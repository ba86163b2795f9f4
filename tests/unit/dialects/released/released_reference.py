"""A plain model of one session under the released rules, to hold the session core against.

Written from what must hold, lane by lane, and not from ``protocol.env_session``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlmesh_ray.protocol.env_session import FailureKind
from rlmesh_ray.protocol.messages import EpisodeRecord


@dataclass(slots=True)
class Running:
    """An episode that goes on."""

    lane: int
    episode_id: str
    seed: int | None
    num_steps: int = 0
    total_reward: float = 0.0

    def reported(self, cause: str) -> tuple[object, ...]:
        """Return what a record must say when the episode ends: ``t``, ``x`` or both."""
        return (
            self.lane,
            self.episode_id,
            self.seed,
            self.num_steps,
            self.total_reward,
            "t" in cause,
            "x" in cause,
        )


def reported(record: EpisodeRecord) -> tuple[object, ...]:
    """Return what ``record`` says, in the form of ``Running.reported``."""
    return (
        record.env_index,
        record.episode_id,
        record.seed,
        record.step_count,
        record.cumulative_reward,
        record.terminated,
        record.truncated,
    )


@dataclass(slots=True)
class ReleasedReference:
    """What must be true of one session."""

    num_lanes: int
    autoresets: bool
    steps_subsets: bool
    num_minted: int = 0
    lanes: dict[int, Running | None] = field(default_factory=dict)
    """By lane that has been reset; None: its episode has ended."""
    replaced: list[tuple[object, ...]] = field(default_factory=list)
    is_over: bool = False

    def ids(self) -> tuple[str, ...]:
        """Return each lane's id, empty where nothing runs."""
        running = (self.lanes.get(lane) for lane in range(self.num_lanes))
        return tuple(one.episode_id if one else "" for one in running)

    def allows(self, lanes: Sequence[int]) -> str:
        """Return the code with which naming ``lanes`` is refused; empty if it is not."""
        if not set(lanes) <= set(range(self.num_lanes)) or len(set(lanes)) < len(lanes):
            return "INVALID_ACTION"
        is_all = list(lanes) == list(range(self.num_lanes))
        return "" if self.steps_subsets or is_all or not lanes else "UNSUPPORTED"

    def reset(self, lanes: Sequence[int], seeds: Sequence[int], ids: Sequence[str]) -> list[int]:
        """Reset ``lanes`` (none: all); return the seeds that their environments must get."""
        own = list(lanes) or list(range(self.num_lanes))
        if len(seeds) == 1 and not lanes:
            seeds = [seeds[0] + lane for lane in own]
        for lane in own:
            running = self.lanes.get(lane)
            if running:
                self.replaced = [*self.replaced, running.reported("x")][-100:]
        for position, lane in enumerate(own):
            seed = seeds[position] if seeds else None
            self.lanes[lane] = Running(lane, self._id(ids, position), seed)
        return list(seeds)

    def step(
        self,
        lanes: Sequence[int],
        rewards: Sequence[float],
        ends: Sequence[str],
        ids: Sequence[str],
    ) -> list[tuple[object, ...]] | None:
        """Step ``lanes`` (none: all); return the reported episodes, or None after a breach."""
        own = list(lanes) or list(range(self.num_lanes))
        due = [lane for lane in own if self.autoresets and self.lanes[lane] is None]
        if any(rewards[own.index(lane)] != 0 or ends[own.index(lane)] for lane in due):
            return None
        over = [one for one in self.replaced if one[0] in own]
        self.replaced = [one for one in self.replaced if one[0] not in own]
        for position, lane in enumerate(own):
            running = self.lanes[lane]
            if lane in due:
                self.lanes[lane] = Running(lane, self._id(ids, position), None)
            elif running:
                running.num_steps += 1
                running.total_reward += rewards[position]
                if ends[position]:
                    over.append(running.reported(ends[position]))
                    self.lanes[lane] = None
        return over

    def fail(
        self, kind: FailureKind, lanes: Sequence[int], *, is_render: bool
    ) -> list[tuple[object, ...]]:
        """Lose what a failure loses; return the reported episodes."""
        if kind in (FailureKind.BAD_ACTION, FailureKind.BAD_REQUEST):
            return []
        if is_render and kind in (FailureKind.RAISED, FailureKind.TIMEOUT):
            return []
        if kind is FailureKind.BAD_OBSERVATION:
            return self.end()
        is_own = kind is FailureKind.RAISED and lanes
        return self._cut_off(list(lanes) if is_own else list(range(self.num_lanes)))

    def end(self) -> list[tuple[object, ...]]:
        """End the session; return the reported episodes."""
        self.is_over = True
        return [*self.replaced, *self._cut_off(list(range(self.num_lanes)))]

    def _cut_off(self, lanes: Sequence[int]) -> list[tuple[object, ...]]:
        lost = [self.lanes.pop(lane, None) for lane in lanes]
        return [running.reported("x") for running in lost if running]

    def _id(self, ids: Sequence[str], position: int) -> str:
        if position < len(ids) and ids[position]:
            return ids[position]
        self.num_minted += 1
        return f"minted-{self.num_minted - 1}"
