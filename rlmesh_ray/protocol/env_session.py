"""Request ordering and episode accounting of one env stream, server side. Sans-I/O.

Rule 1: the legal requests of each state and the effects of failures are in the dialect's
``EnvRules``, and nowhere else.
Rule 2: check, then act: a refused request changes nothing.
Rule 3: nothing here blocks, reads a clock, logs, or decodes a payload.
Rule 4: an episode is tracked from ``EpisodeTracker.begin`` until its lane reports terminated or
truncated. In edition 2026.06 ("Episode Accounting") only an explicit Reset begins one; an episode
that an autoreset starts is not tracked.
Rule 5: an episode's record is returned exactly once.
Rule 6: only the party that steps the lanes counts. The tracker knows the episode of each lane, and
reads the counts when it makes a record.

The caller passes each message to ``receive``, which returns the response, or None: then the caller
executes ``pending`` and passes its outcome to ``complete``, which returns the response.
Requests are processed one at a time, in arrival order (edition 2026.06, "Ordering").
"""

import enum
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    Close,
    Closed,
    Configure,
    Configured,
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EpisodeRecord,
    Infos,
    MalformedRequest,
    Render,
    Rendered,
    Request,
    Reset,
    ResetDone,
    Step,
    StepDone,
)


class SessionState(enum.Enum):
    """State of one env stream."""

    AWAIT_RESET = enum.auto()
    READY = enum.auto()
    """At least one lane has been reset; with most rules all have."""
    ABANDONED = enum.auto()
    """After a non-recoverable error: only Close is legal."""
    CLOSED = enum.auto()


Requests = Mapping[SessionState, Mapping[type[Request], SessionState]]
"""The legal kinds of request in each state, with the state after success."""

EDITION_REQUESTS: Requests = {
    SessionState.AWAIT_RESET: {
        Reset: SessionState.READY,
        Render: SessionState.AWAIT_RESET,
        Close: SessionState.CLOSED,
    },
    SessionState.READY: {
        Reset: SessionState.READY,
        Step: SessionState.READY,
        Render: SessionState.READY,
        Close: SessionState.CLOSED,
    },
    SessionState.ABANDONED: {
        Close: SessionState.CLOSED,
    },
    SessionState.CLOSED: {},
}


# --- failures --------------------------------------------------------------------------

NOT_STARTED = "the environment has not started within"
"""Prefix of the message of a TIMEOUT while the environment is starting: the request was not
executed, the start goes on, and the client may send the request again."""


class FailureKind(enum.Enum):
    """Why a legal request failed."""

    TIMEOUT = enum.auto()
    """The deadline passed; the worker may still be busy, and its result is dropped."""
    RAISED = enum.auto()
    """The environment raised; its worker lives."""
    CRASHED = enum.auto()
    """The worker died or was killed."""
    BAD_ACTION = enum.auto()
    """The action does not conform to its space; the environment never saw it."""
    BAD_OBSERVATION = enum.auto()
    """The environment's observation does not conform to its space."""
    BAD_REQUEST = enum.auto()
    """The request's own arguments are wrong; nothing has changed."""
    OUT_OF_ORDER = enum.auto()
    """The request's number is neither the last one nor the next (``transport.exactly_once``)."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request failed."""

    kind: FailureKind
    message: str
    """Error message for the client, in one line."""
    debug_info: str = ""
    """Traceback of the worker, as text."""


class Effect(enum.Enum):
    """Effect of a failure on the session."""

    NONE = enum.auto()
    INTERRUPT = enum.auto()
    """The episodes of all lanes end; a Reset starts new ones."""
    INTERRUPT_OWN = enum.auto()
    """The episodes of the request's lanes end; the other lanes go on."""
    ABANDON = enum.auto()
    """The session ends: the error is non-recoverable."""


@dataclass(frozen=True, slots=True)
class Consequence:
    """Error code and effect of a kind of failure."""

    code: EnvErrorCode
    effect: Effect


# Edition 2026.06: "Timeouts and Errors", and "Structural conformance" for BAD_ACTION and
# BAD_OBSERVATION.
EDITION_FAILURES: Mapping[FailureKind, Consequence] = {
    FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.INTERRUPT),
    FailureKind.CRASHED: Consequence(EnvErrorCode.CRASHED, Effect.INTERRUPT),
    FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.INTERRUPT),
    FailureKind.BAD_ACTION: Consequence(EnvErrorCode.INVALID_ACTION, Effect.ABANDON),
    FailureKind.BAD_OBSERVATION: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
    FailureKind.BAD_REQUEST: Consequence(EnvErrorCode.INVALID_ACTION, Effect.NONE),
    FailureKind.OUT_OF_ORDER: Consequence(EnvErrorCode.INTERNAL, Effect.ABANDON),
}
RENDER_FAILURES: Mapping[FailureKind, Consequence] = {
    FailureKind.TIMEOUT: Consequence(EnvErrorCode.TIMEOUT, Effect.NONE),
    FailureKind.RAISED: Consequence(EnvErrorCode.INTERNAL, Effect.NONE),
}
"""What differs for Render, in all dialects: the episodes continue without the picture."""


# --- rules and outcomes ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvRules:
    """The rules of one dialect."""

    requests: Requests
    failures: Mapping[FailureKind, Consequence]
    editions: frozenset[str] = frozenset()
    """The editions that a Configure may name."""
    subsets_are_advertised: bool = False
    """Whether Reset and Step may name their lanes only where the endpoint has the capability
    ``subset_step``, and then any lanes at any time. If not, any Reset but the first may."""
    narrows_replies: bool = False
    """Whether the response to a request that names its lanes has entries for these only, in the
    request's order. If not, it has entries for all lanes."""
    client_mints_ids: bool = False
    """Whether episodes have the ids that the client sends."""
    spreads_one_seed: bool = False
    """Whether a Reset of several lanes may have a single seed: lane ``i`` then gets seed + i."""
    tracks_autoresets: bool = False
    """Whether an episode that an autoreset begins is tracked like any other."""
    reports_superseded: bool = False
    """Whether the records of episodes that a Reset ends are sent with the next Step."""
    truncates_interrupted: bool = False
    """Whether an interrupted episode counts as truncated."""
    ends_when_abandoned: bool = False
    """Whether the stream ends after a non-recoverable error."""


EDITION_2026_06_RULES = EnvRules(requests=EDITION_REQUESTS, failures=EDITION_FAILURES)


_MOST_LISTED = 32
_MAX_SUPERSEDED = 100  # records of episodes that Resets have ended, before a Step takes them
_LARGEST_SEED = 2**63 - 1  # an int64 field


_Invalid = tuple[EnvErrorCode, str]
"""Error code and message of a refused request."""


@dataclass(frozen=True, slots=True)
class ResetOutcome:
    """The lanes were reset."""

    observation: bytes
    """A batch over all lanes, encoded by the dialect; with ``EnvRules.narrows_replies`` over those
    that were reset."""
    infos: Infos


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The lanes were stepped; every sequence has one entry for each stepped lane."""

    observation: bytes
    rewards: Sequence[float]
    terminated: bytes
    truncated: bytes
    infos: Infos
    final_infos: Mapping[int, Infos] = field(default_factory=dict)
    """By lane: the last infos of each episode that ended on this step."""


@dataclass(frozen=True, slots=True)
class RenderOutcome:
    """The lanes were rendered."""

    png: bytes | None
    """None: the environment has no frame."""
    took_s: float = 0.0


EnvOutcome = ResetOutcome | StepOutcome | RenderOutcome | Failure


# --- episodes --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EpisodeStart:
    """Id, seed and start time of an episode."""

    episode_id: str
    seed: int | None
    start_ns: int


class EpisodeCounterSource(Protocol):
    """Counts of the tracked episodes, as the ``EpisodeCounts`` of ``transport.exactly_once``.

    ``is_tracked``, ``step_counts`` and ``cumulative_rewards`` are arrays with one entry for each
    lane. After an episode has ended, its counts stay until the lane begins another.
    """

    @property
    def now(self) -> Any:
        """The counts after the last request."""

    @property
    def before(self) -> Any:
        """The counts before the last request."""


class EpisodeTracker:
    """The tracked episodes of one session, by lane; ``new_id`` never returns the same id twice."""

    def __init__(
        self, num_lanes: int, new_id: Callable[[], str], counters: EpisodeCounterSource
    ) -> None:
        # The latest episode of each lane, until its record has been returned.
        self._episodes: list[EpisodeStart | None] = [None] * num_lanes
        self._all_lanes = range(num_lanes)
        self.counters = counters
        self._new_id = new_id

    @property
    def episode_ids(self) -> tuple[str, ...]:
        """Id of each lane's tracked episode; empty where there is none."""
        return tuple(
            episode.episode_id if is_tracked and episode else ""
            for episode, is_tracked in zip(
                self._episodes, self.counters.now.is_tracked, strict=True
            )
        )

    @property
    def episodes(self) -> tuple[EpisodeStart | None, ...]:
        """The latest episode of each lane; None: its record has been returned, or none began."""
        return tuple(self._episodes)

    def set_episodes(self, episodes: Sequence[EpisodeStart | None]) -> None:
        self._episodes = list(episodes)

    def begin(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int],
        now_ns: int,
        episode_ids: Sequence[str] = (),
    ) -> None:
        """Begin an episode in each of ``lanes``; one that was running is forgotten.

        Seeds are none, or one for each of ``lanes``. Missing and empty ids are created.
        """
        for position, lane in enumerate(lanes):
            seed = seeds[position] if seeds else None
            given = episode_ids[position] if position < len(episode_ids) else ""
            self._episodes[lane] = EpisodeStart(given or self._new_id(), seed, now_ns)

    def completed(
        self,
        terminated: Sequence[int],
        truncated: Sequence[int],
        final_infos: Mapping[int, Infos],
        now_ns: int,
        lanes: Sequence[int] = (),
    ) -> tuple[EpisodeRecord, ...]:
        """Return the records of the episodes that the last request, a step, has ended.

        There is one flag for each stepped lane (none named: all); final infos are by lane.
        """
        if not (any(terminated) or any(truncated)):
            return ()
        now, before = self.counters.now, self.counters.before
        records = []
        for position, lane in enumerate(lanes or self._all_lanes):
            if not (terminated[position] or truncated[position]):
                continue
            if before.is_tracked[lane] and not now.is_tracked[lane]:
                flags = (bool(terminated[position]), bool(truncated[position]))
                records += self._take_record(lane, now, flags, final_infos.get(lane, {}), now_ns)
        return tuple(records)

    def interrupt(
        self,
        lanes: Iterable[int],
        now_ns: int,
        *,
        is_truncated: bool = False,
        is_before: bool = False,
    ) -> tuple[EpisodeRecord, ...]:
        """Stop tracking in ``lanes``; return the records of the running episodes, without infos.

        With ``is_before`` the counts before the last request apply: it ended the episodes.
        """
        counts = self.counters.before if is_before else self.counters.now
        records = []
        for lane in lanes:
            if counts.is_tracked[lane]:
                records += self._take_record(lane, counts, (False, is_truncated), {}, now_ns)
            self._episodes[lane] = None
        return tuple(records)

    def finalize(self, now_ns: int) -> tuple[EpisodeRecord, ...]:
        """Stop tracking in all lanes; return the records, neither terminated nor truncated."""
        return self.interrupt(self._all_lanes, now_ns)

    def _take_record(
        self,
        lane: int,
        counts: Any,
        flags: tuple[bool, bool],
        final_info: Infos,
        now_ns: int,
    ) -> list[EpisodeRecord]:
        """Return the record of a lane's episode; no record the second time."""
        episode, self._episodes[lane] = self._episodes[lane], None
        if episode is None:
            return []
        terminated, truncated = flags
        return [
            EpisodeRecord(
                episode_id=episode.episode_id,
                env_index=lane,
                step_count=int(counts.step_counts[lane]),
                cumulative_reward=float(counts.cumulative_rewards[lane]),
                terminated=terminated,
                truncated=truncated,
                start_timestamp_ns=episode.start_ns,
                end_timestamp_ns=now_ns,
                seed=episode.seed,
                final_info=final_info,
            )
        ]


# --- the session -----------------------------------------------------------------------


class EnvSession:
    """State of one env stream.

    Args:
        num_lanes: Width of the session's vector.
        new_id: Returns a new episode id.
        counters: The worker's counts of the episodes.
        rules: The rules of the session's dialect.
        autoresets: Whether the autoreset mode is NEXT_STEP.
        steps_subsets: Whether the endpoint can reset and step any of its lanes alone.
    """

    def __init__(
        self,
        num_lanes: int,
        new_id: Callable[[], str],
        counters: EpisodeCounterSource,
        rules: EnvRules = EDITION_2026_06_RULES,
        *,
        autoresets: bool = False,
        steps_subsets: bool = False,
    ) -> None:
        self._num_lanes = num_lanes
        self._all_lanes = range(num_lanes)
        self.tracker = EpisodeTracker(num_lanes, new_id, counters)
        self._rules = rules
        self._steps_subsets = steps_subsets
        self._tracks_autoresets = autoresets and rules.tracks_autoresets
        self.state = SessionState.AWAIT_RESET
        self.pending: EnvRequest | None = None
        """The request to execute: the last one received, with the changes of the rules."""
        self.autoreset_lanes: tuple[int, ...] = ()
        # The lanes that have been reset since the session's start or since their loss.
        self.begun_lanes: set[int] = set()
        # Records of episodes that Resets have ended, in the order of the Resets.
        self._superseded: deque[EpisodeRecord] = deque(maxlen=max(_MAX_SUPERSEDED, num_lanes))

    def receive(self, request: EnvRequest | MalformedRequest, now_ns: int) -> EnvResponse | None:
        """Process the next message of the stream, in arrival order.

        Returns the response, or None: execute ``pending``; ``complete`` returns the response.
        Raises LocalProtocolError where the former request has not been completed.
        """
        if self.pending is not None:
            raise LocalProtocolError("a request is already in progress", request.request_id)
        if isinstance(request, MalformedRequest):
            return self._refuse(request, EnvErrorCode.INVALID_ACTION, request.reason)
        if type(request) not in self._rules.requests[self.state]:
            return self._illegal(request)
        error = self._invalid_request(request)
        if error is not None:
            if isinstance(request, Configure):  # an edition that is not served ends the session
                return self._abandon(request, *error, now_ns)
            return self._refuse(request, *error)
        if isinstance(request, Configure):
            return Configured(request.request_id)
        if isinstance(request, Close):
            self.state = SessionState.CLOSED
            return Closed(request.request_id, self._all_cut_off(now_ns))
        self.pending = self._spread(request) if isinstance(request, Reset) else request
        self.autoreset_lanes = ()
        if isinstance(request, Step) and self._tracks_autoresets:
            ids = self.tracker.episode_ids
            lanes = request.env_indices or self._all_lanes
            self.autoreset_lanes = tuple(lane for lane in lanes if not ids[lane])
        return None

    def complete(self, outcome: EnvOutcome, now_ns: int) -> EnvResponse:
        """Return the response to the request in progress; raises LocalProtocolError without one."""
        request, self.pending = self.pending, None
        match request, outcome:
            case None, _:
                raise LocalProtocolError("no request is in progress")
            case _, Failure():
                return self._fail(request, outcome, now_ns)
            case Reset(), ResetOutcome():
                response = self._reset(request, outcome, now_ns)
            case Step(), StepOutcome():
                error = self._outcome_mismatch(request, outcome) if self._tracks_autoresets else ""
                if error:
                    self.state = SessionState.ABANDONED
                    records = self._all_cut_off(now_ns, is_before=True)
                    return EnvFailed(
                        request.request_id, EnvErrorCode.INTERNAL, error, False, "", records
                    )
                response = self._step(request, outcome, now_ns)
            case Render(), RenderOutcome():
                response = Rendered(request.request_id, outcome.png)
            case _:
                raise LocalProtocolError(
                    f"{type(outcome).__name__} does not answer {type(request).__name__}",
                    request.request_id,
                )
        self.state = self._rules.requests[self.state][type(request)]
        return response

    def interrupt(self, now_ns: int) -> None:
        """Close the session of a stream that ended without Close."""
        self.pending = None
        self._all_cut_off(now_ns)
        self.state = SessionState.CLOSED

    def _reset(self, request: Reset, outcome: ResetOutcome, now_ns: int) -> EnvResponse:
        lanes = request.env_indices or self._all_lanes
        if self._rules.reports_superseded:
            self._superseded.extend(self._cut_off(lanes, now_ns, is_before=True))
        ids = request.episode_ids if self._rules.client_mints_ids else ()
        self.tracker.begin(lanes, request.seeds, now_ns, ids)
        self.begun_lanes.update(lanes)
        return ResetDone(
            request.request_id, outcome.observation, outcome.infos, self._ids_of(request)
        )

    def _step(self, request: Step, outcome: StepOutcome, now_ns: int) -> EnvResponse:
        lanes = request.env_indices or self._all_lanes
        completed = self.tracker.completed(
            outcome.terminated,
            outcome.truncated,
            outcome.final_infos,
            now_ns,
            lanes,
        )
        if self.autoreset_lanes:
            given = zip(lanes, request.episode_ids, strict=False)
            ids = [episode_id for lane, episode_id in given if lane in self.autoreset_lanes]
            self.tracker.begin(self.autoreset_lanes, (), now_ns, ids)
        if self._rules.reports_superseded:
            completed = (*self._take_superseded(lanes), *completed)
        return StepDone(
            request.request_id,
            outcome.observation,
            outcome.rewards,
            outcome.terminated,
            outcome.truncated,
            outcome.infos,
            completed,
            self._ids_of(request),
            request.env_indices,
        )

    def _fail(self, request: EnvRequest, failure: Failure, now_ns: int) -> EnvResponse:
        consequence = self._rules.failures[failure.kind]
        if isinstance(request, Render):
            consequence = RENDER_FAILURES.get(failure.kind, consequence)
        if consequence.effect is Effect.ABANDON:
            return self._abandon(
                request, consequence.code, failure.message, now_ns, failure.debug_info
            )
        named = request.env_indices if isinstance(request, (Reset, Step, Render)) else ()
        lanes: Sequence[int] = ()
        if consequence.effect is not Effect.NONE:
            own = named if consequence.effect is Effect.INTERRUPT_OWN else ()
            lanes = own or self._all_lanes
        interrupted = self._cut_off(lanes, now_ns)
        self.begun_lanes.difference_update(lanes)
        if not self.begun_lanes:
            self.state = SessionState.AWAIT_RESET
        return EnvFailed(
            request.request_id,
            consequence.code,
            failure.message,
            True,
            failure.debug_info,
            interrupted,
        )

    def _abandon(
        self, request: Request, code: EnvErrorCode, message: str, now_ns: int, debug_info: str = ""
    ) -> EnvFailed:
        self.state = SessionState.ABANDONED
        interrupted = self._all_cut_off(now_ns)
        return EnvFailed(request.request_id, code, message, False, debug_info, interrupted)

    def _illegal(self, request: EnvRequest) -> EnvResponse:
        name = type(request).__name__
        if self.state is SessionState.AWAIT_RESET:
            message = f"{name} needs a Reset first"
            return self._refuse(request, EnvErrorCode.NOT_READY, message)
        message = f"{name} is not allowed: an error has ended the session; open a new one"
        return EnvFailed(request.request_id, EnvErrorCode.CLOSED, message, is_recoverable=False)

    def _refuse(self, request: Request, code: EnvErrorCode, message: str) -> EnvFailed:
        is_recoverable = self.state in (SessionState.AWAIT_RESET, SessionState.READY)
        return EnvFailed(request.request_id, code, message, is_recoverable)

    def _invalid_request(self, request: EnvRequest) -> _Invalid | None:
        if isinstance(request, Step):
            is_plain = not request.env_indices and len(self.begun_lanes) == self._num_lanes
            return None if is_plain else self._check_step(request)
        match request:
            case Reset():
                return self._check_reset(request)
            case Render() if request.env_indices:
                return self._check_lanes("Render", request.env_indices)
            case Configure():
                return self._check_edition(request.edition)
        return None

    def _check_step(self, request: Step) -> _Invalid | None:
        lanes = request.env_indices
        if lanes:
            if not self._rules.subsets_are_advertised:
                return _invalid("Step.env_indices is reserved by edition 2026.06; step all lanes")
            error = self._check_subset("Step", lanes)
            if error is not None:
                return error
        missing = [lane for lane in lanes or range(self._num_lanes) if lane not in self.begun_lanes]
        if not missing:
            return None
        return (EnvErrorCode.NOT_READY, f"Step needs a Reset of the lanes {_listed(missing)} first")

    def _check_reset(self, request: Reset) -> _Invalid | None:
        lanes = request.env_indices
        if lanes:
            error = self._check_subset("Reset", lanes)
            if error is not None:
                return error
            is_first_of_all = not self.begun_lanes and not self._rules.subsets_are_advertised
            if is_first_of_all and len(lanes) < self._num_lanes:
                return _invalid(
                    "the first Reset (and the first after an interruption) must reset all lanes"
                )
        return self._check_seeds(request.seeds, len(lanes))

    def _check_subset(self, kind: str, lanes: Sequence[int]) -> _Invalid | None:
        error = self._check_lanes(kind, lanes)
        is_possible = self._steps_subsets or not self._rules.subsets_are_advertised
        if error is not None or is_possible or lanes == tuple(range(self._num_lanes)):
            return error
        return (
            EnvErrorCode.UNSUPPORTED,
            f"{kind}.env_indices {_listed(lanes)}: this endpoint's lanes go together (it does not "
            "offer the capability subset_step); leave env_indices out, or serve single "
            "environments that do not reset themselves",
        )

    def _check_lanes(self, kind: str, lanes: Sequence[int]) -> _Invalid | None:
        if len(lanes) > self._num_lanes:  # first: there may be a million of them
            return _invalid(
                f"{kind}.env_indices has {len(lanes)} entries; there are {self._num_lanes} lanes"
            )
        if any(not 0 <= lane < self._num_lanes for lane in lanes):
            return _invalid(
                f"{kind}.env_indices {_listed(lanes)} are not all in [0, {self._num_lanes})"
            )
        if len(set(lanes)) != len(lanes):
            return _invalid(f"{kind}.env_indices {_listed(lanes)} name a lane twice")
        return None

    def _check_seeds(self, seeds: Sequence[int], num_named: int) -> _Invalid | None:
        wanted = num_named or self._num_lanes
        if self._rules.spreads_one_seed and len(seeds) == 1 and not num_named:
            if seeds[0] + wanted - 1 > _LARGEST_SEED:
                return _invalid(
                    f"Reset.seeds {list(seeds)}: the seeds of {wanted} lanes, counted up from it, "
                    "exceed int64; give one a lane"
                )
            return None
        if not seeds or len(seeds) == wanted:
            return None
        return _invalid(f"Reset.seeds has {len(seeds)} entries; give none or one a lane ({wanted})")

    def _check_edition(self, edition: str) -> _Invalid | None:
        # Release candidates append their own version to the edition's name.
        if not edition or edition.partition("-")[0] in self._rules.editions:
            return None
        supported = ", ".join(sorted(self._rules.editions))
        return _invalid(f"edition {quoted(edition)!r} is not supported here; configure {supported}")

    def _spread(self, reset: Reset) -> Reset:
        if len(reset.seeds) != 1 or reset.env_indices:
            return reset
        return replace(reset, seeds=tuple(reset.seeds[0] + lane for lane in self._all_lanes))

    def _outcome_mismatch(self, request: Step, outcome: StepOutcome) -> str:
        """Return how the environment has broken its autoreset mode; empty if it has not."""
        due = set(self.autoreset_lanes)
        for position, lane in enumerate(request.env_indices or self._all_lanes):
            if lane not in due:
                continue
            reward = outcome.rewards[position]
            if reward != 0 or outcome.terminated[position] or outcome.truncated[position]:
                return (
                    f"lane {lane} had ended, so this step had to begin its next episode with the "
                    f"reward 0 (NEXT_STEP), but its reward was {reward} or it ended again; declare "
                    "the environment's true autoreset mode"
                )
        return ""

    def _cut_off(
        self, lanes: Iterable[int], now_ns: int, *, is_before: bool = False
    ) -> tuple[EpisodeRecord, ...]:
        is_truncated = self._rules.truncates_interrupted
        return self.tracker.interrupt(lanes, now_ns, is_truncated=is_truncated, is_before=is_before)

    def _all_cut_off(self, now_ns: int, *, is_before: bool = False) -> tuple[EpisodeRecord, ...]:
        """End all episodes; return their records, after those that no Step has taken."""
        superseded = self._take_superseded(self._all_lanes)
        return (*superseded, *self._cut_off(self._all_lanes, now_ns, is_before=is_before))

    def _take_superseded(self, lanes: Iterable[int]) -> tuple[EpisodeRecord, ...]:
        if not self._superseded:
            return ()
        own, kept = set(lanes), list(self._superseded)
        self._superseded.clear()
        self._superseded.extend(record for record in kept if record.env_index not in own)
        return tuple(record for record in kept if record.env_index in own)

    def _ids_of(self, request: Reset | Step) -> tuple[str, ...]:
        ids = self.tracker.episode_ids
        if request.env_indices and self._rules.narrows_replies:
            return tuple(ids[lane] for lane in request.env_indices)
        return ids


def _listed(lanes: Sequence[int]) -> str:
    first = ", ".join(map(str, lanes[:_MOST_LISTED]))
    return f"[{first}, …]" if len(lanes) > _MOST_LISTED else f"[{first}]"


def _invalid(message: str) -> _Invalid:
    return EnvErrorCode.INVALID_ACTION, message
