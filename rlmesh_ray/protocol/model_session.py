"""Ordering of one model stream, server side.

Rule 1: requests of one route are worked on one at a time, in arrival order; requests of
different routes at once (edition 2026.06, "Ordering and Errors";
capability rlmesh.model.concurrent_predict.v1).
Rule 2: every legal request is in the table of the rules; a refused one changes nothing, and is
answered when its turn on its route comes, so that its answer cannot overtake an earlier one's.
Rule 3: Close is answered after everything that came before it.
Rule 4: nothing here blocks, reads a clock, logs, or looks inside a payload.
Rule 5: what generations disagree about is data (``model_rules``).

The shell feeds each message to ``receive`` and each result to ``complete``. Both return what
to do next: responses to send, in order, and requests that the host may work on now.
"""

from collections import deque
from dataclasses import dataclass, field

from rlmesh_ray.errors import LocalProtocolError
from rlmesh_ray.protocol.handshake import quoted
from rlmesh_ray.protocol.messages import (
    CloseModel,
    MalformedRequest,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Request,
    RouteRequest,
)
from rlmesh_ray.protocol.model_rules import (
    EDITION_2026_06_RULES,
    RESPONSE_TYPES,
    ModelRules,
    RouteState,
    SessionRequest,
    SessionResponse,
)


@dataclass(slots=True)
class _RouteQueue:
    state: RouteState = RouteState.ABSENT
    in_progress: RouteRequest | None = None
    waiting: deque[RouteRequest] = field(default_factory=deque)


@dataclass(slots=True)
class ModelSessionOutput:
    """What the shell does next."""

    responses: list[SessionResponse] = field(default_factory=list)
    """To send, in this order."""
    ready: list[RouteRequest] = field(default_factory=list)
    """To work on; each one's result goes to ``complete``, in whatever order they finish."""


class ModelSession:
    """State of one model stream.

    Args:
        rules: Of the stream's generation.
    """

    def __init__(self, rules: ModelRules = EDITION_2026_06_RULES) -> None:
        self._requests = rules.requests
        self._remedy = rules.remedy
        self._routes: dict[str, _RouteQueue] = {}
        self._outstanding: set[str] = set()
        self._closing: CloseModel | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        """Whether Close has been answered."""
        return self._is_closed

    @property
    def num_outstanding(self) -> int:
        """How many route requests have not been answered."""
        return len(self._outstanding)

    @property
    def num_routes(self) -> int:
        """How many routes are configured, or have requests that have not been answered."""
        return len(self._routes)

    def receive(self, request: SessionRequest | MalformedRequest) -> ModelSessionOutput:
        """Take the next message of the stream, in arrival order."""
        output = ModelSessionOutput()
        refusal = self._refusal(request)
        if refusal is not None:
            output.responses.append(refusal)
        elif isinstance(request, CloseModel):
            self._closing = request
            self._maybe_close(output)
        elif isinstance(request, RouteRequest):
            self._outstanding.add(request.request_id)
            route_id = request.context.route_id
            route = self._routes.get(route_id)
            if route is None:
                route = self._routes[route_id] = _RouteQueue()
            route.waiting.append(request)
            self._advance(route_id, output)
        return output

    def complete(self, request: RouteRequest, response: SessionResponse) -> ModelSessionOutput:
        """Take the host's answer to a request that was ready.

        Args:
            request: The request.
            response: Its answer: of the request's own kind, or ModelFailed.

        Raises:
            LocalProtocolError: The request is not being worked on, or the answer is of
                another kind.
        """
        route = self._routes.get(request.context.route_id)
        if route is None or route.in_progress is not request:
            raise LocalProtocolError("the request is not being worked on", request.request_id)
        if type(response) is not RESPONSE_TYPES[type(request)] and not isinstance(
            response, ModelFailed
        ):
            name = type(response).__name__
            raise LocalProtocolError(
                f"{name} does not answer {type(request).__name__}", request.request_id
            )
        route.in_progress = None
        if not isinstance(response, ModelFailed):
            route.state = self._requests[route.state][type(request)]
        output = ModelSessionOutput()
        self._answer(response, output)
        self._advance(request.context.route_id, output)
        return output

    def _advance(self, route_id: str, output: ModelSessionOutput) -> None:
        route = self._routes[route_id]
        while route.waiting and route.in_progress is None:
            request = route.waiting.popleft()
            if type(request) in self._requests[route.state]:
                route.in_progress = request
                output.ready.append(request)
            else:
                self._answer(self._not_configured(request), output)
        if route.state is RouteState.ABSENT and route.in_progress is None:
            del self._routes[route_id]

    def _answer(self, response: SessionResponse, output: ModelSessionOutput) -> None:
        self._outstanding.discard(response.request_id)
        output.responses.append(response)
        self._maybe_close(output)

    def _maybe_close(self, output: ModelSessionOutput) -> None:
        if self._closing is not None and not self._outstanding:
            output.responses.append(ModelClosed(self._closing.request_id))
            self._is_closed = True
            self._closing = None

    def _refusal(self, request: SessionRequest | MalformedRequest) -> ModelFailed | None:
        if self._closing is not None or self._is_closed:
            return ModelFailed(
                request.request_id,
                ModelErrorCode.CLOSED,
                "the session is closing; nothing may follow Close",
                is_recoverable=False,
            )
        if isinstance(request, MalformedRequest):
            return _invalid(request, request.reason)
        if request.request_id in self._outstanding:
            return _invalid(request, "this request_id is still outstanding")
        return None

    def _not_configured(self, request: RouteRequest) -> ModelFailed:
        return ModelFailed(
            request.request_id,
            ModelErrorCode.NOT_CONFIGURED,
            f"route {quoted(request.context.route_id)!r} is not configured; {self._remedy}",
            is_recoverable=True,
        )


def _invalid(request: Request, reason: str) -> ModelFailed:
    return ModelFailed(
        request.request_id, ModelErrorCode.INVALID_REQUEST, reason, is_recoverable=True
    )
