"""Server dialect of ``rlmesh-wire-v1`` for sessions with a policy: lanes, translation, timings.

Rule 1: a frame becomes one or several requests of the core (one a group), or a malformed one. It
is answered once, when all of its requests have been.
Rule 2: the core's requests have ids of their own, since a client may use one twice.
Rule 3: an adapter is a route, by the id of its environment; its session id is ignored.
Rule 4: the order of requests is not decided here.
Rule 5: the dialect names neither a route's width nor a row's lane, only the episode of each row. An
episode gets a lane with its first row, and keeps it until the client reports its end.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rlmesh_ray.dialects.released.protocol import (
    MODEL_RULES,
    AdapterPredict,
    AdapterPredicted,
    AdapterResolved,
    AnyAdapterRequest,
    AnyAdapterResponse,
    GroupedPredict,
    GroupedPredicted,
    ModelTimings,
    ResolveAdapter,
)
from rlmesh_ray.dialects.released.server.env_dialect import HANDSHAKE
from rlmesh_ray.dialects.released.wire import model as wire
from rlmesh_ray.dialects.released.wire import values
from rlmesh_ray.errors import CapacityError, CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import EDITION_NAME
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelFailed,
    Predict,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
    TimedBatchRun,
)
from rlmesh_ray.protocol.model_session import (
    EpisodesForgotten,
    ForgetEpisodes,
    ModelSession,
    ModelSessionOutput,
    RouteLanes,
    SessionRequest,
    SessionResponse,
    check_id_lengths,
)
from rlmesh_ray.server.handshake_service import HandshakeFrames
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.batch_codec import BatchCodecs

MAX_EPISODES = 2**16
"""Episodes that one session may have at a time. A policy may keep a state for each of them, and
their number would grow without bound if a client never reported an end."""


class EpisodeLimit:
    """Counts the episodes that have a lane, over all routes of a session.

    Args:
        limit: How many are allowed.
    """

    def __init__(self, limit: int = MAX_EPISODES) -> None:
        self.count = 0
        self._limit = limit

    def add(self, count: int) -> None:
        """Count ``count`` more. Raises CapacityError when they are too many."""
        if self.count + count > self._limit:
            raise CapacityError(
                f"the session would have {self.count + count} episodes, and {self._limit} are the "
                "limit: report the ended ones (reset_adapter), or open another session"
            )
        self.count += count


@dataclass(slots=True)
class _EpisodeLane:
    lane: int
    has_begun: bool = False
    """Whether the policy has chosen an action for the episode."""


class EpisodeLanes(RouteLanes):
    """A lane for each episode that runs; freed lanes are used again.

    A row is the first of its episode until a row of it has been answered with actions.

    Args:
        held: Counts the episodes of all routes of the session.
    """

    def __init__(self, held: EpisodeLimit) -> None:
        self._held = held
        self._lanes: dict[str, _EpisodeLane] = {}
        self._free: list[int] = []

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        episodes = [slot.episode_id for slot in slots]
        _check_episodes(episodes)
        new = [episode for episode in episodes if episode not in self._lanes]
        check_id_lengths(new)
        self._held.add(len(new))
        for episode in new:
            # Without a gap in them, there are as many lanes as episodes.
            self._lanes[episode] = _EpisodeLane(
                self._free.pop() if self._free else len(self._lanes)
            )
        return tuple(self._assigned(slot) for slot in slots)

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Make the next row of an episode its first again, if the failed row was that."""
        for slot in slots:
            self._lanes[slot.episode_id].has_begun = not slot.reset

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of those episodes that are known, each once."""
        return [self._lanes[episode].lane for episode in self._known(episode_ids)]

    def free(self, episode_ids: Sequence[str]) -> None:
        known = self._known(episode_ids)
        self._free += [self._lanes.pop(episode).lane for episode in known]
        self._held.count -= len(known)

    def clear(self) -> None:
        self.free(tuple(self._lanes))

    def _known(self, episode_ids: Sequence[str]) -> list[str]:
        return [episode for episode in dict.fromkeys(episode_ids) if episode in self._lanes]

    def _assigned(self, slot: PredictSlot) -> PredictSlot:
        episode_lane = self._lanes[slot.episode_id]
        is_first, episode_lane.has_begun = not episode_lane.has_begun, True
        return PredictSlot(episode_lane.lane, slot.episode_id, slot.step, is_first)


def _check_episodes(episodes: Sequence[str]) -> None:
    if not episodes:
        raise CodecError("predict names no episodes; give episode_info for each row")
    if "" in episodes:
        raise CodecError("predict has an empty episode_id; each row needs the id of its episode")
    if len(set(episodes)) < len(episodes):
        raise CodecError("predict names an episode twice; each row needs one of its own")


_NO_LANE = -1


@dataclass(slots=True, eq=False)
class PendingFrame:
    """A frame that has not been answered, with the answers to its requests so far."""

    request: AnyAdapterRequest | MalformedRequest
    arrived_ns: int
    decode_ns: int
    """Time to decode the frame."""
    groups: tuple[AdapterPredict, ...] = ()
    """Each is a request of the core; empty: the frame is one request."""
    answers: list[SessionResponse | None] = field(default_factory=list)
    """One for each of the core's requests."""
    num_left: int = 0

    def response(self) -> AnyAdapterResponse:
        answers = [answer for answer in self.answers if answer is not None]
        if not self.groups:
            (answer,) = answers
            return _answered(self.request, answer)
        results = zip(self.groups, answers, strict=True)
        return GroupedPredicted(
            self.request.request_id, tuple(_outcome(group, answer) for group, answer in results)
        )

    def timings(
        self, *, ended_ns: int, encode_ns: int, in_flight: int, held_episodes: int
    ) -> ModelTimings:
        """Return the timings of the answer.

        Args:
            ended_ns: When its frame was encoded.
            encode_ns: Time to encode it.
            in_flight: Requests of the stream that have not been answered, this one included.
            held_episodes: Episodes of the stream.
        """
        total_ns = ended_ns - self.arrived_ns
        predicted = [answer for answer in self.answers if isinstance(answer, Predicted)]
        # Groups that ran in one batch share its times.
        runs = {id(answer.run): answer.run for answer in predicted if answer.run is not None}
        if not runs:
            return ModelTimings(endpoint_total_ns=total_ns, in_flight=in_flight)
        timed = [run for run in runs.values() if isinstance(run, TimedBatchRun)]
        return ModelTimings(
            endpoint_total_ns=total_ns,
            decode_ns=self.decode_ns + sum(run.decode_ns for run in timed),
            user_ns=sum(run.forward_ns for run in runs.values()),
            encode_ns=encode_ns + sum(run.encode_ns for run in timed),
            queue_ns=max(answer.queue_ns for answer in predicted),
            in_flight=in_flight,
            held_episodes=held_episodes,
        )


class ModelTranslation:
    """The translation of one stream."""

    def __init__(self) -> None:
        self._outstanding: dict[str, tuple[PendingFrame, int]] = {}
        """By the core's request id: the frame, and the request's index in it."""
        self._num_requests = 0
        self._num_in_flight = 0
        self._is_closing = False

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    def receive(
        self, request: AnyAdapterRequest | MalformedRequest, arrived_ns: int, decode_ns: int
    ) -> Sequence[SessionRequest | MalformedRequest]:
        """Handle a frame's message; return at least one request for the core, in this order.

        Args:
            request: The message.
            arrived_ns: When its frame came.
            decode_ns: Time to decode it.
        """
        exchange = PendingFrame(request, arrived_ns, decode_ns)
        # After Close, the core refuses the frame as one request.
        if isinstance(request, GroupedPredict) and not self._is_closing:
            exchange.groups = request.groups
        requests = [self._predict(group) for group in exchange.groups] or [self._one(request)]
        for place, one in enumerate(requests):
            self._outstanding[one.request_id] = exchange, place
        exchange.num_left = len(requests)
        exchange.answers = [None] * len(requests)
        self._num_in_flight += 1
        return requests

    def answer(self, response: SessionResponse) -> PendingFrame | None:
        exchange, place = self._outstanding.pop(response.request_id)
        exchange.answers[place] = response
        exchange.num_left -= 1
        if exchange.num_left:
            return None
        self._num_in_flight -= 1
        return exchange

    def _one(
        self, request: AnyAdapterRequest | MalformedRequest
    ) -> SessionRequest | MalformedRequest:
        match request:
            case AdapterPredict():
                return self._predict(request)
            case ResolveAdapter():
                return self._resolve(request)
            case ForgetEpisodes() | CloseRoute():
                return replace(request, request_id=self._next_id())
            case CloseModel():
                self._is_closing = True
                return replace(request, request_id=self._next_id())
            case GroupedPredict():
                return self._unreadable("grouped_predict has no groups")
            case MalformedRequest(reason=reason):
                return self._unreadable(reason)

    def _resolve(self, request: ResolveAdapter) -> SessionRequest | MalformedRequest:
        if not request.context.route_id:
            return self._unreadable("resolve_adapter has no env_id")
        if request.env_spec is None:
            return self._unreadable("resolve_adapter has no env_spec")
        # Builds before the release named theirs after it, such as 2026.06-0.1.0-rc.5.
        if request.edition and request.edition.partition("-")[0] != EDITION_NAME:
            return self._unreadable(
                f"resolve_adapter selects edition {quoted(request.edition)!r}; this is "
                f"{EDITION_NAME}"
            )
        return ConfigureRoute(
            self._next_id(),
            request.context,
            request.env_spec,
            max(1, request.execution_horizon),
        )

    def _predict(self, request: AdapterPredict) -> SessionRequest | MalformedRequest:
        if not request.context.route_id:
            return self._unreadable("predict has no env_id")
        step = request.step or 0
        slots = tuple(
            PredictSlot(_NO_LANE, episode.episode_id, step, False) for episode in request.episodes
        )
        return Predict(self._next_id(), replace(request.context, slots=slots), request.observation)

    def _unreadable(self, reason: str) -> MalformedRequest:
        return MalformedRequest(self._next_id(), reason)

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)


def _answered(
    request: AnyAdapterRequest | MalformedRequest, answer: SessionResponse
) -> AnyAdapterResponse:
    request_id = request.request_id
    match answer:
        case Predicted(action=action, later=later):
            assert isinstance(request, AdapterPredict)
            return AdapterPredicted(request_id, request.context, (action, *later))
        case RouteConfigured(horizon=horizon):
            # One action at a time is no length of a chunk: a runtime refuses a horizon beyond a
            # chunk of 1, and accepts any horizon if there is no length.
            return AdapterResolved(request_id, horizon if horizon > 1 else None)
        case ModelFailed() | RouteClosed() | EpisodesForgotten() | ModelClosed():
            return replace(answer, request_id=request_id)


def _outcome(group: AdapterPredict, answer: SessionResponse) -> AdapterPredicted | ModelFailed:
    outcome = _answered(group, answer)
    assert isinstance(outcome, AdapterPredicted | ModelFailed)
    return outcome


class ReleasedModelServerDialect:
    """``rlmesh-wire-v1``, whose requests are translated for the session and its responses back."""

    frames: ClassVar[HandshakeFrames] = wire
    handshake = HANDSHAKE
    # No observation history: a policy keeps what it has to remember.
    capabilities: ClassVar[Mapping[str, str]] = {capabilities.CONCURRENT_PREDICT: capabilities.YES}
    rules = MODEL_RULES

    def __init__(self) -> None:
        self._translation = ModelTranslation()
        self._held = EpisodeLimit()

    def receive(self, session: ModelSession, frame: bytes) -> list[ModelSessionOutput]:
        arrived_ns = time.perf_counter_ns()
        message = wire.parse_request(frame)
        decode_ns = time.perf_counter_ns() - arrived_ns
        requests = self._translation.receive(message, arrived_ns, decode_ns)
        return [session.receive(request) for request in requests]

    def frame(self, response: SessionResponse) -> bytes | None:
        in_flight = self._translation.num_in_flight
        pending = self._translation.answer(response)
        if pending is None:
            return None
        begun_ns = time.perf_counter_ns()
        packed = wire.pack_response(pending.response())
        ended_ns = time.perf_counter_ns()
        timings = pending.timings(
            ended_ns=ended_ns,
            encode_ns=ended_ns - begun_ns,
            in_flight=in_flight,
            held_episodes=self._held.count,
        )
        return wire.with_timings(packed, timings)

    def lanes(self, contract: EnvContract) -> RouteLanes:
        return EpisodeLanes(self._held)

    def values(self, contract: EnvContract) -> BatchCodecs:
        return values


DIALECT = ReleasedModelServerDialect
