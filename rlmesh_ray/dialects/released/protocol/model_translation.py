"""Translates a model stream of ``rlmesh-wire-v1`` for the session core, and back.

Rule 1: a frame becomes one or several requests of the core (one a group), or a malformed one. It
is answered once, when all of its requests have been.
Rule 2: the core's requests have ids of their own, since a client may use one twice.
Rule 3: an adapter is a route, by the id of its environment; its session id is ignored.
Rule 4: the order of requests and the lanes of episodes are not decided here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlmesh_ray.dialects.released.protocol.model_messages import (
    AdapterContext,
    AdapterPredict,
    AdapterPredicted,
    AdapterReleased,
    AdapterResolved,
    AnyAdapterRequest,
    AnyAdapterResponse,
    CloseParticipant,
    GroupedPredict,
    GroupedPredicted,
    ModelTimings,
    ParticipantClosed,
    ReleaseAdapter,
    ResetAdapter,
    ResolveAdapter,
)
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
    PredictContext,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
    TimedBatchRun,
)
from rlmesh_ray.protocol.model_session import (
    EpisodesForgotten,
    ForgetEpisodes,
    SessionRequest,
    SessionResponse,
)

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
        """Return the message to send, once all requests have been answered."""
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
        """How many frames have not been answered."""
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
        """Handle the core's answer to a request; return the frame that it completes, or None."""
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
            case ResetAdapter(context=context, episode_ids=episode_ids):
                return ForgetEpisodes(self._next_id(), _route(context), episode_ids)
            case ReleaseAdapter(context=context, reason=reason):
                return CloseRoute(self._next_id(), _route(context), reason)
            case CloseParticipant(reason=reason):
                self._is_closing = True
                return CloseModel(self._next_id(), reason)
            case GroupedPredict():
                return self._unreadable("grouped_predict has no groups")
            case MalformedRequest(reason=reason):
                return self._unreadable(reason)

    def _resolve(self, request: ResolveAdapter) -> SessionRequest | MalformedRequest:
        if not request.context.env_id:
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
            _route(request.context),
            request.env_spec,
            max(1, request.execution_horizon),
        )

    def _predict(self, request: AdapterPredict) -> SessionRequest | MalformedRequest:
        if not request.context.env_id:
            return self._unreadable("predict has no env_id")
        step = request.step or 0
        slots = tuple(
            PredictSlot(_NO_LANE, episode.episode_id, step, False) for episode in request.episodes
        )
        return Predict(self._next_id(), _route(request.context, slots), request.observation)

    def _unreadable(self, reason: str) -> MalformedRequest:
        return MalformedRequest(self._next_id(), reason)

    def _next_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)


def _route(context: AdapterContext, slots: tuple[PredictSlot, ...] = ()) -> PredictContext:
    return PredictContext(context.session_id, context.env_id, context.request_id, slots)


def _answered(
    request: AnyAdapterRequest | MalformedRequest, answer: SessionResponse
) -> AnyAdapterResponse:
    """Return the dialect's message for the core's answer to a request."""
    request_id = request.request_id
    match answer:
        case ModelFailed():
            return replace(answer, request_id=request_id)
        case Predicted(action=action, later=later):
            assert isinstance(request, AdapterPredict)
            return AdapterPredicted(request_id, request.context, (action, *later))
        case RouteConfigured(horizon=horizon):
            # One action at a time is no length of a chunk: a runtime refuses a horizon beyond a
            # chunk of 1, and accepts any horizon if there is no length.
            return AdapterResolved(request_id, horizon if horizon > 1 else None)
        case RouteClosed():
            return AdapterReleased(request_id)
        case EpisodesForgotten():
            return EpisodesForgotten(request_id)
        case ModelClosed():
            return ParticipantClosed(request_id)


def _outcome(group: AdapterPredict, answer: SessionResponse) -> AdapterPredicted | ModelFailed:
    outcome = _answered(group, answer)
    assert isinstance(outcome, AdapterPredicted | ModelFailed)
    return outcome
