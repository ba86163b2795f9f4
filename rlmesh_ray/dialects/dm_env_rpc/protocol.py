"""State machine of a dm_env_rpc world: its agents, their sequences, and its lanes; refusals.

A world has lanes, each with one or several slots; a stream that has joined is the agent in a slot.

Rule 1: a sequence begins with its lane's episode, and ends with it, by a reset, or by being cut.
Rule 2: a lane begins an episode when all of its agents are between sequences and have sent a Step.
Rule 3: the lanes are stepped when all agents with a running sequence have sent a Step.
Rule 4: an agent that has left is not waited for.
Rule 5: nothing here blocks, reads a clock, or decodes a payload.

The caller passes requests in (``step``, ``reset``, ...), does what ``next_work`` returns until that
is None, one work at a time, passes its outcome to ``complete``, and sends the ``replies``.
"""

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlmesh_ray.protocol.messages import message

DM_ENV_RPC = "dm_env_rpc.v1"
"""Name of the dialect."""


class Code(enum.IntEnum):
    """Why a request was refused: the codes of ``google.rpc.Code`` that are used."""

    INVALID_ARGUMENT = 3
    """An action, a setting or the request itself is wrong."""
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    """No such world, or no such property."""
    PERMISSION_DENIED = 7
    """The property cannot be read, or cannot be written."""
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    """The stream has not joined, has joined already, or another agent prevents it."""
    UNIMPLEMENTED = 12
    INTERNAL = 13
    """The environment failed."""


class SequenceState(enum.IntEnum):
    """State of an agent's sequence after a step; the wire's numbers."""

    RUNNING = 1
    TERMINATED = 2
    INTERRUPTED = 3


class WorldError(Exception):
    """A request was refused or has failed; the stream remains usable.

    Args:
        code: Why.
        message: For the client.
        debug_info: The environment's traceback.
        is_lost: Whether the lanes of the world are lost; if not, they are as before.
    """

    def __init__(
        self, code: Code, message: str, debug_info: str = "", *, is_lost: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.debug_info = debug_info
        self.is_lost = is_lost


class SequencePhase(enum.Enum):
    """State of the sequence of an agent."""

    BETWEEN = enum.auto()
    """The next Step begins a sequence."""
    RUNNING = enum.auto()
    CUT = enum.auto()
    """Another stream has reset the world, or its lanes are lost: the answer to the next Step
    reports that."""


class LanePhase(enum.Enum):
    """State of a lane of the environment."""

    NEW = enum.auto()
    """It was never reset, must start over, or is lost."""
    FRESH = enum.auto()
    """It has begun an episode, whose first observation no agent has received."""
    LIVE = enum.auto()
    ENDED = enum.auto()


@message
class ResetLanes:
    """Work: begin episodes."""

    lanes: tuple[int, ...]
    """Empty: all, with the world's reset options."""
    reset_options: object
    """Options of the request; None: it has none."""


@message
class StepLanes:
    """Work: step all lanes."""

    actions: Mapping[int, object]
    """By slot, for those that act."""


Work = ResetLanes | StepLanes


@message
class WorkDone:
    """Outcome of work."""

    frame: object
    """Observations of all lanes."""
    states: Mapping[int, SequenceState]
    """After a step: of the sequence, by slot that has acted."""
    has_ended: Sequence[bool]
    """After a step: by lane."""


@message
class AgentStepReply:
    """Answers a Step."""

    state: SequenceState
    frame: object
    """Latest observations of all lanes."""
    is_acted: bool
    """Whether an action has led to the frame, so that its rewards count."""


Reply = AgentStepReply | WorldError


@dataclass(slots=True)
class _Agent:
    lane: int
    phase: SequencePhase = SequencePhase.BETWEEN
    is_waiting: bool = False
    """Whether a Step has not been answered."""
    action: object = None
    frame: object = None
    """The frame of the latest answer."""


@dataclass(slots=True)
class _Lane:
    state: LanePhase = LanePhase.NEW
    first_frame: object = None
    """Of a FRESH lane."""
    reset_options: object = None
    """Of the reset before its next episode; None: there are none."""


class World:
    """The agents and lanes of one world.

    Args:
        slot_lanes: The lane of each slot.
        resets_itself: Whether stepping an ended lane begins its next episode.
        quorum: How many agents must have joined before an episode begins.
    """

    def __init__(self, slot_lanes: Sequence[int], *, resets_itself: bool, quorum: int = 1) -> None:
        self._slot_lanes = tuple(slot_lanes)
        self._resets_itself = resets_itself
        self._quorum = quorum
        self._agents: dict[int, _Agent] = {}
        self._lanes = [_Lane() for _ in range(max(slot_lanes) + 1)]
        self.restart_options: object = None
        """Options of the next reset of all lanes; None: there are none."""
        self._is_autoreset_welcome = True
        # Grows when all lanes start over: the outcome of work begun before is dropped.
        self._generation = 0
        # In progress, and the generation of lanes at its begin.
        self._work: tuple[Work, int] | None = None
        self._replies: list[tuple[int, Reply]] = []

    @property
    def joined(self) -> Collection[int]:
        return self._agents.keys()

    def phase(self, slot: int) -> SequencePhase:
        return self._agents[slot].phase

    def take(self, slot: int) -> None:
        """Add an agent in a slot that has none."""
        self._agents[slot] = _Agent(self._slot_lanes[slot])

    def leave(self, slot: int) -> None:
        lane = self._agents.pop(slot).lane
        self._replies = [(other, reply) for other, reply in self._replies if other != slot]
        if all(own.lane != lane for own in self._agents.values()):
            self._lanes[lane].reset_options = None

    def step(self, slot: int, action: object) -> None:
        """Handle a Step, whose ``action`` is applied if the sequence of the agent runs.

        The one before it has been answered: a stream has one request at a time.
        """
        own = self._agents[slot]
        own.is_waiting, own.action = True, action
        if own.phase is SequencePhase.CUT:
            self._tell(slot)

    def reset(self, slot: int) -> None:
        self._agents[slot].phase = SequencePhase.BETWEEN

    def reset_options(self, slot: int, reset_options: object) -> None:
        self._lanes[self._agents[slot].lane].reset_options = reset_options

    def restart(self, reset_options: object, *, is_autoreset_welcome: bool = True) -> None:
        """Make all lanes begin new episodes; this ends no sequence.

        Args:
            reset_options: Options of their reset.
            is_autoreset_welcome: Whether an agent may get an episode that a lane has begun by
                autoreset.
        """
        self.restart_options, self._is_autoreset_welcome = reset_options, is_autoreset_welcome
        self._forget_lanes()

    def reset_world(self, caller: int | None) -> set[int]:
        """End all sequences; one more answer reports that to each of the other agents.

        Args:
            caller: The slot of the caller; None: it has not joined.

        Returns:
            The slots of these agents; ``is_any_cut`` says whether one does not have the answer yet.
        """
        if caller is not None:
            self.reset(caller)
        cut = {slot for slot in self._agents if slot != caller and self._cut(slot)}
        in_step = isinstance(self._work[0], StepLanes) if self._work else False
        for slot in cut:
            # A step in progress is answered with its outcome.
            if self._agents[slot].is_waiting and not in_step:
                self._tell(slot)
        return cut

    def is_any_cut(self, slots: Iterable[int]) -> bool:
        return any(
            slot in self._agents and self._agents[slot].phase is SequencePhase.CUT for slot in slots
        )

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
                missing = self._missing_reset(lane)
                if missing is not None:
                    return self._issue(missing)
                self._begin(lane)
            num_running, num_acting, _ = self._count_agents()
        if not num_running or num_acting < num_running:
            return None
        if not self._resets_itself:
            ended = [at for at, lane in enumerate(self._lanes) if lane.state is LanePhase.ENDED]
            if ended:
                return self._issue(ResetLanes(tuple(ended), None))
        return self._issue(
            StepLanes(
                {
                    slot: own.action
                    for slot, own in self._agents.items()
                    if own.phase is SequencePhase.RUNNING
                }
            )
        )

    def complete(self, outcome: WorkDone | WorldError) -> None:
        """Handle the outcome of the work in progress."""
        assert self._work is not None, "the work that next_work has returned"
        (work, generation), self._work = self._work, None
        is_current = generation == self._generation
        if isinstance(outcome, WorldError):
            self._work_failed(work, outcome)
        elif isinstance(work, StepLanes):
            if is_current:
                self._note_step(outcome)
            self._answer_step(work, outcome)
        elif is_current:
            self._note_reset(work, outcome.frame)

    @property
    def is_work_unneeded(self) -> bool:
        if self._work is None:
            return False
        work, _ = self._work
        if isinstance(work, ResetLanes):
            return not any(own.is_waiting for own in self._agents.values())
        return not any(map(self._is_acting, work.actions))

    def abandon_work(self) -> None:
        """Forget the work in progress, and the lanes with it; agents that wait go on waiting."""
        self._work = None
        self._lose()

    def _count_agents(self) -> tuple[int, int, bool]:
        num_running = num_acting = 0
        wants_to_begin = False
        for own in self._agents.values():
            if own.phase is SequencePhase.RUNNING:
                num_running += 1
                num_acting += own.is_waiting
            elif own.is_waiting:
                wants_to_begin = True
        return num_running, num_acting, wants_to_begin

    def _is_acting(self, slot: int) -> bool:
        """Return whether an agent waits for the step in progress, in which its slot acts.

        Another agent may have joined there since the step began, or may have been reset.
        """
        own = self._agents.get(slot)
        return own is not None and own.is_waiting and own.phase is not SequencePhase.BETWEEN

    # --- beginnings ----------------------------------------------------------------------

    def _ready_lanes(self) -> list[int]:
        if len(self._agents) < self._quorum:
            return []
        by_lane: dict[int, bool] = {}
        for own in self._agents.values():
            is_ready = own.is_waiting and own.phase is SequencePhase.BETWEEN
            by_lane[own.lane] = by_lane.get(own.lane, True) and is_ready
        return [lane for lane, is_ready in by_lane.items() if is_ready]

    def _missing_reset(self, number: int) -> ResetLanes | None:
        """Return the reset that a lane needs before it can begin; None: it needs none."""
        lane = self._lanes[number]
        if lane.state is LanePhase.NEW:
            return ResetLanes((), self.restart_options)
        if lane.state is LanePhase.FRESH and lane.reset_options is None:
            return None
        return ResetLanes((number,), lane.reset_options)

    def _begin(self, number: int) -> None:
        lane = self._lanes[number]
        frame, lane.first_frame, lane.state = lane.first_frame, None, LanePhase.LIVE
        for slot, own in self._agents.items():
            if own.lane == number:
                own.phase = SequencePhase.RUNNING
                self._answer(slot, AgentStepReply(SequenceState.RUNNING, frame, is_acted=False))

    def _note_reset(self, done: ResetLanes, frame: object) -> None:
        for number in done.lanes or range(len(self._lanes)):
            lane = self._lanes[number]
            lane.state, lane.first_frame = LanePhase.FRESH, frame
            if done.lanes and lane.reset_options is done.reset_options:
                lane.reset_options = None
        if not done.lanes:
            # A seed is for one reset; the options that an agent has set for its lane remain.
            self.restart_options = None

    # --- steps ---------------------------------------------------------------------------

    def _note_step(self, outcome: WorkDone) -> None:
        for lane, has_ended in zip(self._lanes, outcome.has_ended, strict=True):
            if has_ended:
                lane.state = LanePhase.ENDED
            elif lane.state is LanePhase.ENDED and self._is_autoreset_welcome:
                lane.state, lane.first_frame = LanePhase.FRESH, outcome.frame
            else:
                lane.state = LanePhase.LIVE

    def _answer_step(self, done: StepLanes, outcome: WorkDone) -> None:
        for slot in filter(self._is_acting, done.actions):
            own = self._agents[slot]
            state = outcome.states[slot]
            if own.phase is SequencePhase.CUT and state is SequenceState.RUNNING:
                state = SequenceState.INTERRUPTED
            if state is not SequenceState.RUNNING:
                self.reset(slot)
            self._answer(slot, AgentStepReply(state, outcome.frame, is_acted=True))

    def _work_failed(self, work: Work, failure: WorldError) -> None:
        if isinstance(work, StepLanes):
            failed = list(filter(self._is_acting, work.actions))
        else:
            lanes = work.lanes or range(len(self._lanes))
            ready = [lane for lane in self._ready_lanes() if lane in lanes]
            failed = [
                slot for slot, own in self._agents.items() if own.is_waiting and own.lane in ready
            ]
        for slot in failed:
            self._answer(slot, failure)
        if failure.is_lost:
            self._lose()

    # --- endings -------------------------------------------------------------------------

    def _forget_lanes(self) -> None:
        self._generation += 1
        for lane in self._lanes:
            lane.state, lane.first_frame = LanePhase.NEW, None

    def _lose(self) -> None:
        self._forget_lanes()
        for slot, own in self._agents.items():
            if self._cut(slot) and own.is_waiting:
                self._tell(slot)

    def _cut(self, slot: int) -> bool:
        """Cut the sequence of an agent, if it runs; return whether it is cut now."""
        own = self._agents[slot]
        if own.phase is SequencePhase.RUNNING:
            own.phase = SequencePhase.CUT
        return own.phase is SequencePhase.CUT

    def _tell(self, slot: int) -> None:
        """Answer an agent that its sequence was cut."""
        self.reset(slot)
        frame = self._agents[slot].frame
        self._answer(slot, AgentStepReply(SequenceState.INTERRUPTED, frame, is_acted=False))

    def _answer(self, slot: int, reply: Reply) -> None:
        own = self._agents[slot]
        own.is_waiting, own.action = False, None
        if isinstance(reply, AgentStepReply):
            own.frame = reply.frame
        self._replies.append((slot, reply))

    def _issue(self, work: Work) -> Work:
        self._work = work, self._generation
        return work
