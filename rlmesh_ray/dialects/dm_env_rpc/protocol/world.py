"""State machine of a dm_env_rpc world: its agents, their sequences, and its lanes.

A world has lanes, each with one or several slots; a stream that has joined is the agent in a slot.

Rule 1: every transition of a sequence is in ``SEQUENCES``.
Rule 2: a lane begins an episode when all of its agents are between sequences and have sent a Step.
Rule 3: the lanes are stepped when all agents with a running sequence have sent a Step.
Rule 4: an agent that has left is not waited for.
Rule 5: nothing here blocks, reads a clock, or decodes a payload.

The caller passes requests in (``step``, ``reset``, ...), does what ``next_work`` returns until that
is None, one work at a time, passes its outcome to ``complete``, and sends the ``replies``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import ErrorResponse, SequenceState
from rlmesh_ray.dialects.dm_env_rpc.protocol.sequences import (
    SEQUENCES,
    AgentStepReply,
    LanesReset,
    LanesStepped,
    Outcome,
    Reply,
    ResetLanes,
    SequenceEvent,
    SequencePhase,
    StepLanes,
    Work,
    WorkFailed,
)
from rlmesh_ray.dialects.dm_env_rpc.protocol.world_lanes import WorldLanes
from rlmesh_ray.errors import LocalProtocolError


@dataclass(slots=True)
class _SlotState:
    lane: int
    phase: SequencePhase = SequencePhase.BETWEEN
    is_waiting: bool = False
    """Whether a Step of its agent has not been answered."""
    action: object = None
    frame: object = None
    """The frame of the latest answer."""


class World:
    """The slots and lanes of one world.

    Args:
        slot_lanes: The lane of each slot.
        resets_itself: Whether stepping an ended lane begins its next episode.
        quorum: How many agents must have joined before an episode begins.
    """

    def __init__(self, slot_lanes: Sequence[int], *, resets_itself: bool, quorum: int = 1) -> None:
        self._slot_lanes = tuple(slot_lanes)
        self._resets_itself = resets_itself
        self._quorum = quorum
        self._slots: dict[int, _SlotState] = {}
        self._num_lanes = max(slot_lanes) + 1
        self._lanes = WorldLanes(self._num_lanes)
        # In progress, and the generation of lanes at its begin.
        self._work: tuple[Work, int] | None = None
        self._replies: list[tuple[int, Reply]] = []
        self._waits: dict[int, set[int]] = {}
        self._num_waits = 0

    @property
    def joined(self) -> frozenset[int]:
        """The slots with an agent."""
        return frozenset(self._slots)

    @property
    def num_joined(self) -> int:
        """How many slots have an agent."""
        return len(self._slots)

    def phase(self, slot: int) -> SequencePhase:
        """Return the state of the sequence of an agent."""
        return self._slots[slot].phase

    def take(self, slot: int) -> None:
        """Add an agent.

        Raises:
            LocalProtocolError: The slot has one.
        """
        if slot in self._slots:
            raise LocalProtocolError(f"slot {slot} is taken")
        self._slots[slot] = _SlotState(self._slot_lanes[slot])

    def leave(self, slot: int) -> None:
        """Remove an agent; an answer that it waits for is dropped."""
        lane = self._slots.pop(slot).lane
        self._replies = [(other, reply) for other, reply in self._replies if other != slot]
        self._no_longer_cut(slot)
        if all(own.lane != lane for own in self._slots.values()):
            self._lanes.forget_reset_options(lane)

    def step(self, slot: int, action: object) -> None:
        """Handle a Step; ``action`` is applied if the sequence of the agent runs.

        Raises:
            LocalProtocolError: The one before it has not been answered.
        """
        own = self._slots[slot]
        if own.is_waiting:
            raise LocalProtocolError(f"slot {slot} still waits for the answer to its former step")
        own.is_waiting, own.action = True, action
        if own.phase is SequencePhase.CUT:
            self._tell(slot, own)

    def reset(self, slot: int) -> None:
        """End the sequence of one agent."""
        self._change(slot, SequenceEvent.RESET)

    def reset_options(self, slot: int, reset_options: object) -> None:
        """Begin the next episode of a slot's lane with ``reset_options``, which is not None."""
        self._lanes.reset_options(self._slots[slot].lane, reset_options)

    def restart(self, reset_options: object, *, is_autoreset_welcome: bool = True) -> None:
        """Make all lanes begin new episodes; this ends no sequence.

        Args:
            reset_options: Options of their reset.
            is_autoreset_welcome: Whether an agent may get an episode that a lane has begun by
                autoreset.
        """
        self._lanes.restart(reset_options, is_autoreset_welcome=is_autoreset_welcome)

    def reset_world(self, caller: int | None) -> int:
        """End all sequences; one more answer reports that to each of the other agents.

        Args:
            caller: The slot of the caller; None: it has not joined.

        Returns:
            The number of the wait, for ``is_pending``: it lasts until each of them has its answer.
        """
        if caller is not None:
            self._change(caller, SequenceEvent.RESET)
        cut = {slot for slot in self._slots if slot != caller and self._cut(slot)}
        self._num_waits += 1
        self._waits[self._num_waits] = cut
        in_step = isinstance(self._work[0], StepLanes) if self._work else False
        for slot in tuple(cut):
            own = self._slots[slot]
            # A step in progress is answered with its outcome.
            if own.is_waiting and not in_step:
                self._tell(slot, own)
        return self._num_waits

    def is_pending(self, wait: int) -> bool:
        """Return whether a ``reset_world`` still waits for an agent; if not, forget it."""
        if self._waits.get(wait):
            return True
        self._waits.pop(wait, None)
        return False

    def forget_wait(self, wait: int) -> None:
        """Forget a wait of ``reset_world``."""
        self._waits.pop(wait, None)

    def replies(self) -> list[tuple[int, Reply]]:
        """Return the answers since the last call, by slot."""
        replies, self._replies = self._replies, []
        return replies

    def next_work(self) -> Work | None:
        """Return the work to do now; None: there is none, or one is in progress."""
        if self._work is not None:
            return None
        num_running, num_acting, wants_to_begin = self._count_agents()
        if wants_to_begin:
            for lane in self._ready_lanes():
                missing = self._lanes.missing_reset(lane)
                if missing is not None:
                    return self._issue(missing)
                self._begin(lane)
            num_running, num_acting, _ = self._count_agents()
        if not num_running or num_acting < num_running:
            return None
        ended = () if self._resets_itself else self._lanes.ended()
        if ended:
            return self._issue(ResetLanes(ended, None))
        return self._issue(
            StepLanes(
                {
                    slot: own.action
                    for slot, own in self._slots.items()
                    if own.phase is SequencePhase.RUNNING
                }
            )
        )

    def complete(self, outcome: Outcome) -> None:
        """Handle the outcome of the work in progress.

        Raises:
            LocalProtocolError: No work is in progress, or it is of another kind.
        """
        work, self._work = self._work, None
        match work, outcome:
            case (ResetLanes() as done, generation), LanesReset(frame):
                if generation == self._lanes.generation:
                    self._lanes.note_reset(done, frame)
            case (ResetLanes() as done, _), WorkFailed():
                self._reset_failed(done, outcome)
            case (StepLanes() as done, generation), LanesStepped():
                self._lanes_stepped(done, outcome, is_current=generation == self._lanes.generation)
            case (StepLanes() as done, _), WorkFailed():
                self._step_failed(done, outcome)
            case _:
                raise LocalProtocolError(f"{type(outcome).__name__} answers nothing")

    @property
    def is_work_unneeded(self) -> bool:
        """Whether no agent waits for the work in progress any more."""
        if self._work is None:
            return False
        work, _ = self._work
        if isinstance(work, ResetLanes):
            return not any(own.is_waiting for own in self._slots.values())
        acting = [own for slot, own in self._slots.items() if slot in work.actions]
        # The agent in a slot may have joined after the work began.
        return not any(own.is_waiting and own.phase is not SequencePhase.BETWEEN for own in acting)

    def abandon_work(self) -> None:
        """Forget the work in progress, and the lanes with it; agents that wait go on waiting."""
        self._work = None
        self._lose()

    def _count_agents(self) -> tuple[int, int, bool]:
        """Return how many sequences run, how many of them act, and if an agent wants to begin."""
        num_running = num_acting = 0
        wants_to_begin = False
        for own in self._slots.values():
            if own.phase is SequencePhase.RUNNING:
                num_running += 1
                num_acting += own.is_waiting
            elif own.is_waiting:
                wants_to_begin = True
        return num_running, num_acting, wants_to_begin

    # --- beginnings ----------------------------------------------------------------------

    def _ready_lanes(self) -> list[int]:
        if len(self._slots) < self._quorum:
            return []
        by_lane: dict[int, bool] = {}
        for own in self._slots.values():
            is_ready = own.is_waiting and own.phase is SequencePhase.BETWEEN
            by_lane[own.lane] = by_lane.get(own.lane, True) and is_ready
        return [lane for lane, is_ready in by_lane.items() if is_ready]

    def _begin(self, lane: int) -> None:
        frame = self._lanes.begin(lane)
        for slot, own in self._slots.items():
            if own.lane == lane:
                self._change(slot, SequenceEvent.BEGIN)
                self._answer(
                    slot, own, AgentStepReply(SequenceState.RUNNING, frame, is_acted=False)
                )

    def _reset_failed(self, done: ResetLanes, failed: WorkFailed) -> None:
        lanes = done.lanes or range(self._num_lanes)
        self._refuse([lane for lane in self._ready_lanes() if lane in lanes], failed.refusal)
        if failed.is_lost:
            self._lose()

    def _refuse(self, lanes: Sequence[int], refusal: ErrorResponse) -> None:
        for slot, own in self._slots.items():
            if own.is_waiting and own.lane in lanes:
                self._answer(slot, own, refusal)

    # --- steps ---------------------------------------------------------------------------

    def _lanes_stepped(self, done: StepLanes, outcome: LanesStepped, *, is_current: bool) -> None:
        if is_current:
            self._lanes.note_step(outcome)
        for slot in done.actions:
            own = self._slots.get(slot)
            # Another agent may have joined meanwhile, or the world was reset.
            if own is None or not own.is_waiting or own.phase is SequencePhase.BETWEEN:
                continue
            state = outcome.states[slot]
            if own.phase is SequencePhase.CUT and state is SequenceState.RUNNING:
                state = SequenceState.INTERRUPTED
            is_over = state is not SequenceState.RUNNING
            self._change(slot, SequenceEvent.END if is_over else SequenceEvent.GO_ON)
            self._answer(slot, own, AgentStepReply(state, outcome.frame, is_acted=True))

    def _step_failed(self, done: StepLanes, failed: WorkFailed) -> None:
        for slot in done.actions:
            own = self._slots.get(slot)
            if own is not None and own.is_waiting and own.phase is not SequencePhase.BETWEEN:
                self._answer(slot, own, failed.refusal)
        if failed.is_lost:
            self._lose()

    # --- endings -------------------------------------------------------------------------

    def _lose(self) -> None:
        self._lanes.lose()
        for slot, own in self._slots.items():
            if self._cut(slot) and own.is_waiting:
                self._tell(slot, own)

    def _cut(self, slot: int) -> bool:
        self._change(slot, SequenceEvent.CUT)
        return self._slots[slot].phase is SequencePhase.CUT

    def _tell(self, slot: int, own: _SlotState) -> None:
        self._change(slot, SequenceEvent.TELL)
        self._answer(
            slot, own, AgentStepReply(SequenceState.INTERRUPTED, own.frame, is_acted=False)
        )

    def _change(self, slot: int, event: SequenceEvent) -> None:
        own = self._slots[slot]
        own.phase = SEQUENCES[own.phase][event]
        if own.phase is not SequencePhase.CUT:
            self._no_longer_cut(slot)

    def _no_longer_cut(self, slot: int) -> None:
        for awaited in self._waits.values():
            awaited.discard(slot)

    def _answer(self, slot: int, own: _SlotState, reply: Reply) -> None:
        own.is_waiting, own.action = False, None
        if isinstance(reply, AgentStepReply):
            own.frame = reply.frame
        self._replies.append((slot, reply))

    def _issue(self, work: Work) -> Work:
        self._work = work, self._lanes.generation
        return work
