"""Ordering and accounting of one env stream, server side.

Rule 1: every legal request is in REQUESTS and every consequence of a failure in FAILURES; no
other code decides what may happen when.
Rule 2: check, then act: a refused request changes nothing.
Rule 3: nothing here blocks, reads a clock, logs, or looks inside a payload.

The shell feeds each message to ``receive``. What comes back is either the answer, or None:
then the host does the work and its outcome goes to ``complete``, which gives the answer.
Requests are processed one at a time, in arrival order (edition 2026.06, "Ordering").
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.episodes import Episode, EpisodeLedger, Tally
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    Render,
    Rendered,
    Request,
    Reset,
    ResetDone,
    Step,
    StepDone,
    Unreadable,
)
from rlmesh_ray.protocol.outcomes import (
    EnvOutcome,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    StepOutcome,
)


class State(enum.Enum):
    """Where one env stream stands."""

    AWAIT_RESET = enum.auto()
    READY = enum.auto()
    ABANDONED = enum.auto()
    """After a non-recoverable error: nothing works any more but Close."""
    CLOSED = enum.auto()


# The state after the request has succeeded. A kind that is missing is refused.
REQUESTS: Mapping[State, Mapping[type[Request], State]] = {
    State.AWAIT_RESET: {
        Reset: State.READY,
        Render: State.AWAIT_RESET,
        Close: State.CLOSED,
    },
    State.READY: {
        Reset: State.READY,
        Step: State.READY,
        Render: State.READY,
        Close: State.CLOSED,
    },
    State.ABANDONED: {
        Close: State.CLOSED,
    },
    State.CLOSED: {},
}


class Effect(enum.Enum):
    """What a failure does to the session."""

    NONE = enum.auto()
    INTERRUPT = enum.auto()
    """The lanes are gone: their episodes end here, a Reset starts over."""
    ABANDON = enum.auto()
    """Non-recoverable."""


@dataclass(frozen=True, slots=True)
class Consequence:
    """How a kind of failure is answered."""

    code: EnvErrorCode
    effect: Effect


@dataclass(frozen=True, slots=True)
class EnvRules:
    """Where dialects differ in meaning, as data."""

    failures: Mapping[FailureKind, Consequence]


# Edition 2026.06: "Timeouts and Errors"; "Structural conformance" for the two rejections.
EDITION_2026_06_RULES = EnvRules(
    failures={
        FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.INTERRUPT),
        FailureKind.CRASHED: Consequence(EnvErrorCode.CRASHED, Effect.INTERRUPT),
        FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT),
        FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.ABANDON),
        FailureKind.BAD_OBSERVATION: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
        FailureKind.BAD_REQUEST: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
    }
)


class EnvSession:
    """State of one env stream.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Mints episode ids.
        rules: What the dialect says about failures.
    """

    def __init__(
        self,
        num_lanes: int,
        new_id: Callable[[], str],
        rules: EnvRules = EDITION_2026_06_RULES,
    ) -> None:
        self._num_lanes = num_lanes
        self._ledger = EpisodeLedger(num_lanes, new_id)
        self._rules = rules
        self._state = State.AWAIT_RESET
        self._pending: EnvRequest | None = None

    @property
    def state(self) -> State:
        """Where the stream stands now."""
        return self._state

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return self._ledger.episode_ids

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The latest of each lane."""
        return self._ledger.episodes

    def share(self, tally: Tally) -> None:
        """Keep the account of the episodes in ``tally``, where somebody else answers steps, too.

        Who does so must keep the rules of this class: answer no step unless the state is READY, and
        none while a request is in progress here.
        """
        self._ledger.share(tally)

    def receive(self, request: EnvRequest | Unreadable, now_ns: int) -> EnvResponse | None:
        """Take the next message of the stream, in arrival order.

        Args:
            request: The message.
            now_ns: Time since the epoch.

        Returns:
            The answer, or None: the host must do it and ``complete`` gives the answer.

        Raises:
            LocalProtocolError: The shell has not completed the former request.
        """
        if self._pending is not None:
            raise LocalProtocolError("a request is already in progress", request.request_id)
        if isinstance(request, Unreadable):
            return self._refuse(request, EnvErrorCode.INVALID_ACTION, request.reason)
        if type(request) not in REQUESTS[self._state]:
            return self._illegal(request)
        objection = self._objection(request)
        if objection:
            return self._refuse(request, EnvErrorCode.INVALID_ACTION, objection)
        if isinstance(request, Close):
            self._state = State.CLOSED
            return Closed(request.request_id, self._ledger.finalize(now_ns))
        self._pending = request
        return None

    def complete(self, outcome: EnvOutcome, now_ns: int) -> EnvResponse:
        """Turn the host's ``outcome`` into the answer to the request in progress.

        Raises:
            LocalProtocolError: No request is in progress, or ``outcome`` is of another kind.
        """
        request, self._pending = self._pending, None
        match request, outcome:
            case None, _:
                raise LocalProtocolError("no request is in progress")
            case _, Failure():
                return self._fail(request, outcome, now_ns)
            case Reset(), ResetOutcome():
                response = self._reset(request, outcome, now_ns)
            case Step(), StepOutcome():
                response = self._step(request, outcome, now_ns)
            case Render(), RenderOutcome():
                response = Rendered(request.request_id, outcome.png)
            case _:
                raise LocalProtocolError(
                    f"{type(outcome).__name__} does not answer {type(request).__name__}",
                    request.request_id,
                )
        self._state = REQUESTS[self._state][type(request)]
        return response

    def interrupt(self, now_ns: int) -> None:
        """The stream ended without Close: forget the episodes, accept nothing more."""
        self._pending = None
        self._ledger.finalize(now_ns)
        self._state = State.CLOSED

    def _reset(self, request: Reset, outcome: ResetOutcome, now_ns: int) -> EnvResponse:
        lanes = request.env_indices or range(self._num_lanes)
        self._ledger.begin(lanes, request.seeds, now_ns)
        return ResetDone(
            request.request_id, outcome.observation, outcome.infos, self._ledger.episode_ids
        )

    def _step(self, request: Step, outcome: StepOutcome, now_ns: int) -> EnvResponse:
        completed = self._ledger.step(
            outcome.rewards, outcome.terminated, outcome.truncated, outcome.final_infos, now_ns
        )
        return StepDone(
            request.request_id,
            outcome.observation,
            outcome.rewards,
            outcome.terminated,
            outcome.truncated,
            outcome.infos,
            completed,
            self._ledger.episode_ids,
        )

    def _fail(self, request: EnvRequest, failure: Failure, now_ns: int) -> EnvResponse:
        consequence = self._rules.failures[failure.kind]
        interrupted: tuple[EpisodeRecord, ...] = ()
        if consequence.effect is Effect.INTERRUPT:
            interrupted = self._ledger.finalize(now_ns)
            self._state = State.AWAIT_RESET
        elif consequence.effect is Effect.ABANDON:
            interrupted = self._ledger.finalize(now_ns)
            self._state = State.ABANDONED
        return EnvFailed(
            request.request_id,
            consequence.code,
            failure.message,
            consequence.effect is not Effect.ABANDON,
            failure.debug_info,
            interrupted,
        )

    def _illegal(self, request: EnvRequest) -> EnvResponse:
        name = type(request).__name__
        if self._state is State.AWAIT_RESET:
            message = f"{name} needs a Reset first"
            return self._refuse(request, EnvErrorCode.NOT_READY, message)
        message = f"{name} is not possible: an error has ended the session; open a new one"
        return EnvFailed(request.request_id, EnvErrorCode.CLOSED, message, is_recoverable=False)

    def _refuse(self, request: Request, code: EnvErrorCode, message: str) -> EnvFailed:
        is_recoverable = self._state in (State.AWAIT_RESET, State.READY)
        return EnvFailed(request.request_id, code, message, is_recoverable)

    def _objection(self, request: EnvRequest) -> str:
        """Return what is wrong with the request's own arguments; empty if nothing."""
        if isinstance(request, Step) and request.env_indices:
            return "Step.env_indices is reserved by edition 2026.06; step all lanes"
        if isinstance(request, Reset):
            return self._reset_objection(request)
        return ""

    def _reset_objection(self, request: Reset) -> str:
        lanes = request.env_indices
        if any(not 0 <= lane < self._num_lanes for lane in lanes):
            return f"Reset.env_indices {list(lanes)} are not all in [0, {self._num_lanes})"
        if len(set(lanes)) != len(lanes):
            return f"Reset.env_indices {list(lanes)} name a lane twice"
        if lanes and self._state is State.AWAIT_RESET and len(lanes) < self._num_lanes:
            return "the first Reset (and the first after an interruption) must reset all lanes"
        wanted = len(lanes) or self._num_lanes
        if request.seeds and len(request.seeds) != wanted:
            return (
                f"Reset.seeds has {len(request.seeds)} entries; give none or one a lane ({wanted})"
            )
        return ""
