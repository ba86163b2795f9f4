"""One dm_env_rpc world: its seats, their sequences, and when its lanes are reset and stepped.

A world has lanes, each with one or several seats (an agent each); a stream that has joined holds
a seat.

Rule 1: every change of a sequence is in ``SEQUENCES``.
Rule 2: a lane begins an episode when all who are joined to it are between sequences and have sent
a Step.
Rule 3: the lanes are stepped when all whose sequence runs have sent a Step; others do not hold them
up.
Rule 4: whoever leaves is waited for no longer.
Rule 5: nothing here blocks, reads a clock, or looks into a payload.

The shell tells what has arrived (``step``, ``reset``, ...), does what ``next_work`` asks for until
that is None, one work at a time, tells its outcome to ``complete``, and hands out ``replies``.
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
    """For the answer to a Step."""
    action: object = None
    frame: object = None
    """Of its last answer."""


class World:
    """The seats and lanes of one world.

    Args:
        slot_lanes: By seat: its lane.
        resets_itself: Whether stepping an ended lane begins its next episode.
        quorum: How many must have joined before an episode begins.
    """

    def __init__(self, slot_lanes: Sequence[int], *, resets_itself: bool, quorum: int = 1) -> None:
        self._slot_lanes = tuple(slot_lanes)
        self._resets_itself = resets_itself
        self._quorum = quorum
        self._slots: dict[int, _SlotState] = {}
        self._num_lanes = max(slot_lanes) + 1
        self._lanes = WorldLanes(self._num_lanes)
        # With the generation of lanes that it was issued for.
        self._work: tuple[Work, int] | None = None
        self._replies: list[tuple[int, Reply]] = []
        self._waits: dict[int, set[int]] = {}
        self._num_waits = 0

    @property
    def joined(self) -> frozenset[int]:
        """The seats that are taken."""
        return frozenset(self._slots)

    @property
    def num_joined(self) -> int:
        """How many seats are taken."""
        return len(self._slots)

    def phase(self, slot: int) -> SequencePhase:
        """Return where the sequence of a taken seat stands."""
        return self._slots[slot].phase

    def take(self, slot: int) -> None:
        """Let somebody sit down.

        Raises:
            LocalProtocolError: The seat is taken.
        """
        if slot in self._slots:
            raise LocalProtocolError(f"seat {slot} is taken")
        self._slots[slot] = _SlotState(self._slot_lanes[slot])

    def leave(self, slot: int) -> None:
        """Free a seat; an answer that is due reaches nobody."""
        lane = self._slots.pop(slot).lane
        self._replies = [(other, reply) for other, reply in self._replies if other != slot]
        self._no_longer_cut(slot)
        if all(own.lane != lane for own in self._slots.values()):
            self._lanes.forget_reset_options(lane)

    def step(self, slot: int, action: object) -> None:
        """Take a Step; ``action`` counts if the sequence of the seat runs.

        Raises:
            LocalProtocolError: The answer to the former one is still due.
        """
        own = self._slots[slot]
        if own.is_waiting:
            raise LocalProtocolError(f"seat {slot} is still waiting for its former step")
        own.is_waiting, own.action = True, action
        if own.phase is SequencePhase.CUT:
            self._tell(slot, own)

    def reset(self, slot: int) -> None:
        """End the sequence of one seat."""
        self._change(slot, SequenceEvent.RESET)

    def reset_options(self, slot: int, reset_options: object) -> None:
        """Begin the next episode of a slot's lane with ``reset_options``, which is not None."""
        self._lanes.reset_options(self._slots[slot].lane, reset_options)

    def restart(self, reset_options: object, *, is_autoreset_welcome: bool = True) -> None:
        """Have all lanes begin with a new episode; no sequence is ended by this.

        Args:
            reset_options: For their reset.
            is_autoreset_welcome: Whether episodes that lanes begin by themselves are as good as
                those that are begun for a seat.
        """
        self._lanes.restart(reset_options, is_autoreset_welcome=is_autoreset_welcome)

    def reset_world(self, caller: int | None) -> int:
        """End all sequences; those of others end with one more answer each.

        Args:
            caller: A seat, or None for somebody who is not joined.

        Returns:
            What ``is_pending`` takes: the caller waits until all others have been told.
        """
        if caller is not None:
            self._change(caller, SequenceEvent.RESET)
        cut = {slot for slot in self._slots if slot != caller and self._cut(slot)}
        self._num_waits += 1
        self._waits[self._num_waits] = cut
        in_step = isinstance(self._work[0], StepLanes) if self._work else False
        for slot in tuple(cut):
            own = self._slots[slot]
            # What is being stepped is answered with what comes of it.
            if own.is_waiting and not in_step:
                self._tell(slot, own)
        return self._num_waits

    def is_pending(self, wait: int) -> bool:
        """Tell whether a ``reset_world`` still waits for somebody; if not, it is forgotten."""
        if self._waits.get(wait):
            return True
        self._waits.pop(wait, None)
        return False

    def forget_wait(self, wait: int) -> None:
        """Wait no longer for those whom a ``reset_world`` has cut."""
        self._waits.pop(wait, None)

    def replies(self) -> list[tuple[int, Reply]]:
        """Return the answers that have come up since the last call, by seat."""
        replies, self._replies = self._replies, []
        return replies

    def next_work(self) -> Work | None:
        """Return what is to be done now; None: nothing, or something is being done."""
        if self._work is not None:
            return None
        num_running, num_acting, is_anyone_ready = self._look_round()
        if is_anyone_ready:
            for lane in self._ready_lanes():
                missing = self._lanes.missing_reset(lane)
                if missing is not None:
                    return self._issue(missing)
                self._begin(lane)
            num_running, num_acting, _ = self._look_round()
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
        """Take the outcome of the work in progress.

        Raises:
            LocalProtocolError: There is none, or it is of another kind.
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
        """Whether there is work in progress that nobody waits for any more."""
        if self._work is None:
            return False
        work, _ = self._work
        if isinstance(work, ResetLanes):
            return not any(own.is_waiting for own in self._slots.values())
        acting = [own for slot, own in self._slots.items() if slot in work.actions]
        # Who sits there now may have come later.
        return not any(own.is_waiting and own.phase is not SequencePhase.BETWEEN for own in acting)

    def abandon_work(self) -> None:
        """Forget the work in progress, and the lanes with it; whoever waits goes on waiting."""
        self._work = None
        self._lose()

    def _look_round(self) -> tuple[int, int, bool]:
        """Return how many sequences run, how many of them act, and if anyone wants to begin."""
        num_running = num_acting = 0
        is_anyone_ready = False
        for own in self._slots.values():
            if own.phase is SequencePhase.RUNNING:
                num_running += 1
                num_acting += own.is_waiting
            elif own.is_waiting:
                is_anyone_ready = True
        return num_running, num_acting, is_anyone_ready

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
            # Somebody else may have sat down meanwhile, or the world was reset.
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
