"""Request ordering of one model stream, server side. Sans-I/O.

Rule 1: requests of one route are executed one at a time, in arrival order; requests of different
routes concurrently (edition 2026.06, "Ordering and Errors"; capability
rlmesh.model.concurrent_predict.v1).
Rule 2: every legal request is in the table of the rules; a refused one changes nothing, and is
answered in its turn on its route, so that its response cannot overtake an earlier one.
Rule 3: Close is answered after everything that came before it.
Rule 4: nothing here blocks, reads a clock, logs, or decodes a payload.
Rule 5: differences between the generations are data (``ModelRules``).

The caller passes each message to ``receive``, and each result to ``complete`` in the order of
completion. Both return what follows, in order: responses to send, and requests to execute.
"""

import enum
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rlmesh_ray.errors import CodecError, LocalProtocolError
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    MAX_ID_CHARACTERS,
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelRequest,
    ModelResponse,
    Predict,
    Predicted,
    PredictSlot,
    Request,
    Response,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
    message,
)


@message
class ForgetEpisodes(RouteRequest):
    """Make a route forget episodes that have ended (``rlmesh-wire-v1`` only)."""

    episode_ids: tuple[str, ...]


@message
class EpisodesForgotten(Response):
    """Answers ForgetEpisodes."""


SessionRequest = ModelRequest | ForgetEpisodes
"""The requests of a model session, in either generation."""
SessionResponse = ModelResponse | EpisodesForgotten
"""The responses of a model session."""
SessionEvent = SessionResponse | RouteRequest
"""A response to send, or a request to execute: its result goes to ``ModelSession.complete``."""


class RouteState(enum.Enum):
    """State of one route."""

    ABSENT = enum.auto()
    CONFIGURED = enum.auto()


RequestTable = Mapping[RouteState, Mapping[type[Request], RouteState]]
"""The legal kinds of request in each state, with the state after success."""


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The rules of one generation."""

    requests: RequestTable
    remedy: str
    """The client's remedy for NOT_CONFIGURED, as part of a sentence."""
    keeps_same_route: bool = False
    """Whether configuring an open route again for the same contract leaves it unchanged; else the
    route starts anew."""


EDITION_2026_06_RULES = ModelRules(
    requests={
        RouteState.ABSENT: {
            ConfigureRoute: RouteState.CONFIGURED,
        },
        RouteState.CONFIGURED: {
            ConfigureRoute: RouteState.CONFIGURED,
            Predict: RouteState.CONFIGURED,
            CloseRoute: RouteState.ABSENT,
        },
    },
    remedy="send ConfigureRoute first",
)
"""The rules of ``rlmesh.protocol.v1``."""

RESPONSE_TYPES: Mapping[type[Request], type[Response]] = {
    ConfigureRoute: RouteConfigured,
    Predict: Predicted,
    ForgetEpisodes: EpisodesForgotten,
    CloseRoute: RouteClosed,
}


@dataclass(slots=True)
class _RouteQueue:
    state: RouteState = RouteState.ABSENT
    in_progress: RouteRequest | None = None
    waiting: deque[RouteRequest] = field(default_factory=deque)


class ModelSession:
    """State of one model stream.

    Args:
        rules: The rules of the stream's generation.
    """

    def __init__(self, rules: ModelRules = EDITION_2026_06_RULES) -> None:
        self._requests = rules.requests
        self._remedy = rules.remedy
        self._routes: dict[str, _RouteQueue] = {}
        self._outstanding: set[str] = set()
        self._closing: CloseModel | None = None
        self.is_closed = False

    @property
    def num_outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def num_routes(self) -> int:
        return len(self._routes)

    def receive(self, request: SessionRequest | MalformedRequest) -> list[SessionEvent]:
        if self._closing is not None or self.is_closed:
            reason = "the session is closing; nothing may follow Close"
            return [
                ModelFailed(request.request_id, ModelErrorCode.CLOSED, reason, is_recoverable=False)
            ]
        if isinstance(request, MalformedRequest):
            return [_invalid(request, request.reason)]
        if request.request_id in self._outstanding:
            return [_invalid(request, "this request_id is still outstanding")]
        following: list[SessionEvent] = []
        if isinstance(request, CloseModel):
            self._closing = request
            self._close_if_done(following)
        elif isinstance(request, RouteRequest):
            self._outstanding.add(request.request_id)
            route_id = request.context.route_id
            route = self._routes.get(route_id)
            if route is None:
                route = self._routes[route_id] = _RouteQueue()
            route.waiting.append(request)
            self._advance(route_id, following)
        return following

    def complete(self, request: RouteRequest, response: SessionResponse) -> list[SessionEvent]:
        """Process the result of a request.

        Args:
            request: One of the requests to execute.
            response: Its response: of the kind that answers it, or ModelFailed.

        Raises:
            LocalProtocolError: The request is not being executed, or the response is of
                another kind.
        """
        route = self._routes.get(request.context.route_id)
        if route is None or route.in_progress is not request:
            raise LocalProtocolError("the request is not being executed", request.request_id)
        has_failed = isinstance(response, ModelFailed)
        if not (has_failed or type(response) is RESPONSE_TYPES[type(request)]):
            name = type(response).__name__
            raise LocalProtocolError(
                f"{name} does not answer {type(request).__name__}", request.request_id
            )
        route.in_progress = None
        if not has_failed:
            route.state = self._requests[route.state][type(request)]
        self._outstanding.discard(request.request_id)
        following: list[SessionEvent] = [response]
        self._advance(request.context.route_id, following)
        return following

    def _advance(self, route_id: str, following: list[SessionEvent]) -> None:
        route = self._routes[route_id]
        while route.waiting and route.in_progress is None:
            request = route.waiting.popleft()
            if type(request) in self._requests[route.state]:
                route.in_progress = request
                following.append(request)
                continue
            self._outstanding.discard(request.request_id)
            following.append(
                ModelFailed(
                    request.request_id,
                    ModelErrorCode.NOT_CONFIGURED,
                    f"route {quoted(route_id)!r} is not configured; {self._remedy}",
                    is_recoverable=True,
                )
            )
        if route.state is RouteState.ABSENT and route.in_progress is None:
            del self._routes[route_id]
        if self._closing is not None:
            self._close_if_done(following)

    def _close_if_done(self, following: list[SessionEvent]) -> None:
        if self._closing is not None and not self._outstanding:
            following.append(ModelClosed(self._closing.request_id))
            self.is_closed = True
            self._closing = None


def _invalid(request: Request, reason: str) -> ModelFailed:
    return ModelFailed(
        request.request_id, ModelErrorCode.INVALID_REQUEST, reason, is_recoverable=True
    )


class RouteLanes:
    """The lanes of one route, which key the policy's state; by default they are never freed."""

    num_reserved = 0
    """Number of lanes that the route has from the start; 0 where episodes get and free them."""

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        """Return the slots of a Predict with the lanes that key the policy's state.

        Raises:
            CodecError: The slots are ambiguous, out of range, or have too long ids.
            CapacityError: There are too many lanes already; nothing has changed.
        """
        raise NotImplementedError

    def note_failed(self, slots: Sequence[PredictSlot]) -> None:
        """Note that a Predict with these rows has not been answered with actions."""

    def lanes_of(self, episode_ids: Sequence[str]) -> list[int]:
        """Return the lanes of the known episodes among ``episode_ids``, without duplicates."""
        return []

    def free(self, episode_ids: Sequence[str]) -> None:
        """Free the lanes of episodes, whose states the policy has dropped."""

    def clear(self) -> None:
        """Free all lanes, since the policy has dropped the states of the route."""


class ContractLanes(RouteLanes):
    """The ``num_envs`` lanes of the route's contract; each slot names its lane.

    Args:
        num_envs: Number of lanes in the contract.

    Raises:
        CodecError: ``num_envs`` is below 1.
    """

    def __init__(self, num_envs: int) -> None:
        if num_envs < 1:
            raise CodecError(
                f"ConfigureRoute's contract has num_envs = {num_envs}; set it to the number of the "
                "environment's lanes, 1 or more"
            )
        self.num_reserved = num_envs

    def assign_lanes(self, slots: Sequence[PredictSlot]) -> Sequence[PredictSlot]:
        num_envs = self.num_reserved
        check_id_lengths([slot.episode_id for slot in slots])
        if len(slots) == 1 and 0 <= slots[0].env_index < num_envs:
            return slots
        if not slots:
            raise CodecError("Predict names no slots; give one for each row of the observation")
        lanes = {slot.env_index for slot in slots}
        if len(lanes) < len(slots):
            raise CodecError("Predict names an env_index twice; each slot needs its own")
        if min(lanes) < 0 or max(lanes) >= num_envs:
            raise CodecError(
                f"Predict names env_index {min(lanes)} to {max(lanes)}; the route's contract has "
                f"num_envs = {num_envs}"
            )
        return slots


def check_id_lengths(episodes: Sequence[str]) -> None:
    """Refuse long episode ids: a policy keeps one for each lane."""
    if episodes and max(map(len, episodes)) > MAX_ID_CHARACTERS:
        raise CodecError(f"predict has an episode_id of more than {MAX_ID_CHARACTERS} characters")
