"""One saboteur for each clause that binds a ModelService, under the clause's key."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.protocol.messages import (
    CloseModel,
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    PredictContext,
    Predicted,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
)
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from tests.compliance.env_saboteurs import COMMON
from tests.compliance.tampering import Sabotage

SILENT = "nobody asked"
"""Id of requests that a saboteur adds and whose answers it keeps."""


class HasAContract(Sabotage):
    def answer_frame(self, frame: bytes) -> bytes:
        extra = service_pb2.HandshakeResponse()
        extra.env_contract.id = "mine"
        return frame + extra.SerializeToString()


class AnswersTheHandshakeWithNoise(Sabotage):
    def answer_frame(self, frame: bytes) -> bytes:
        return b"\xff"


class SelectsAnEditionWhileRefusing(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return answer if answer.compatible else replace(answer, selected_edition="2026.06")


class ShowsNoChecksum(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return replace(answer, spec_sha256="")


class ShowsTheChecksumOfAnotherText(Sabotage):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return replace(answer, spec_sha256="1" * 64)


class RefusesANewerClient(Sabotage):
    def answer(self, offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        if len(offer.editions) < 3:
            return answer
        return replace(answer, compatible=False, selected_edition="", error_message="too new")


class CallsItInvalid(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, ModelFailed):
            response = replace(response, code=ModelErrorCode.INVALID_REQUEST)
        return [response]


class HasOneContractForAllRoutes(Sabotage):
    """Configures every route anew with the contract that came last."""

    routes: tuple[PredictContext, ...] = ()

    def request(self, request: Any) -> Iterable[Any]:
        if not isinstance(request, ConfigureRoute):
            return [request]
        others, self.routes = self.routes, (*self.routes, request.context)
        silent = [replace(request, request_id=SILENT, context=context) for context in others]
        return [*silent, request]

    def response(self, response: Any) -> Iterable[Any]:
        return [] if response.request_id == SILENT else [response]


class ForgetsARouteThatIsConfiguredAgain(Sabotage):
    """Answers the second ConfigureRoute of a route that is open, and closes it."""

    opened: tuple[str, ...] = ()

    def early(self, request: Any) -> Iterable[Any]:
        return [RouteConfigured(request.request_id)] if self._is_again(request) else []

    def request(self, request: Any) -> Iterable[Any]:
        if self._is_again(request):
            return [CloseRoute(SILENT, request.context)]
        if isinstance(request, ConfigureRoute):
            self.opened = (*self.opened, request.context.route_id)
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        return [] if response.request_id == SILENT else [response]

    def _is_again(self, request: Any) -> bool:
        return isinstance(request, ConfigureRoute) and request.context.route_id in self.opened


class KeepsRoutesOpen(Sabotage):
    def early(self, request: Any) -> Iterable[Any]:
        return [RouteClosed(request.request_id)] if isinstance(request, CloseRoute) else []

    def request(self, request: Any) -> Iterable[Any]:
        return [] if isinstance(request, CloseRoute) else [request]


class PredictsForAnything(Sabotage):
    """Answers a wrong observation as if it were a right one."""

    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, ModelFailed) and "bytes" in response.message:
            return [Predicted(response.request_id, self.memory["context"], b"")]
        return [response]

    def request(self, request: Any) -> Iterable[Any]:
        if isinstance(request, Predict):
            self.memory["context"] = request.context
        return [request]


class ForgetsTheSession(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Predicted):
            response = replace(response, context=replace(response.context, session_id=""))
        return [response]


class ReordersMirroredSlots(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Predicted):
            slots = sorted(response.context.slots, key=lambda slot: slot.env_index)
            context = replace(response.context, slots=tuple(slots))
            response = replace(response, context=context)
        return [response]


class InsistsOnItsIds(Sabotage):
    """Breaks nothing: refuses contexts of another session, and ids that do not agree."""

    own = ""

    def joined(self, metadata: dict[str, str]) -> None:
        self.own = metadata[capabilities.SESSION_METADATA_KEY]

    def early(self, request: Any) -> Iterable[Any]:
        if not self._is_strange(request):
            return []
        code = ModelErrorCode.INVALID_REQUEST
        return [ModelFailed(request.request_id, code, "whose context is this?", True)]

    def request(self, request: Any) -> Iterable[Any]:
        return [] if self._is_strange(request) else [request]

    def _is_strange(self, request: Any) -> bool:
        if not isinstance(request, RouteRequest):
            return False
        reported = (request.context.session_id, request.context.request_id)
        return reported != (self.own, request.request_id)


class ActsOutsideTheSpace(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Predicted):
            actions = [99] * len(response.context.slots)
            response = replace(response, action=np.array(actions, "<i8").tobytes())
        return [response]


class ReversesTheActions(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Predicted):
            actions = np.frombuffer(response.action, "<i8")
            response = replace(response, action=actions[::-1].tobytes())
        return [response]


class GivesAnActionTooMany(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        if isinstance(response, Predicted):
            response = replace(response, action=response.action + bytes(8))
        return [response]


class RepeatsPredictions(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [response, response] if isinstance(response, Predicted) else [response]


class SaysNothingAboutErrors(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [replace(response, message="") if isinstance(response, ModelFailed) else response]


class GivesUpAfterAnError(Sabotage):
    has_failed = False

    def response(self, response: Any) -> Iterable[Any]:
        if self.has_failed:
            return [ModelFailed(response.request_id, ModelErrorCode.CLOSED, "gave up", False)]
        self.has_failed = isinstance(response, ModelFailed)
        return [response]


class SwapsPredictions(Sabotage):
    """Answers the first prediction of a session's second route behind the request after it.

    Where a check opens two routes in a session, it asks for predictions without waiting. The
    answer is kept for as long as it takes, so that it does not hang on who is faster, the
    client that sends or the model that answers.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        super().__init__(memory)
        self.num_routes = 0
        self.swapped: list[str] = []
        self.kept: list[Any] = []

    def request(self, request: Any) -> Iterable[Any]:
        self.num_routes += isinstance(request, ConfigureRoute)
        is_first = isinstance(request, Predict) and self.num_routes == 2
        if len(self.swapped) == 1 or (is_first and not self.swapped):
            self.swapped.append(request.request_id)
        return [request]

    def response(self, response: Any) -> Iterable[Any]:
        if response.request_id not in self.swapped:
            return [response]
        self.kept.append(response)
        if len(self.kept) < 2:
            return []
        return sorted(self.kept, key=lambda one: -self.swapped.index(one.request_id))


class HidesThatItSwaps(SwapsPredictions):
    def answer(self, _offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
        return without_concurrency(answer)


class ClosesAtOnce(Sabotage):
    """Answers Close before what is outstanding, which is dropped."""

    def early(self, request: Any) -> Iterable[Any]:
        return [ModelClosed(request.request_id), None] if isinstance(request, CloseModel) else []


class AnswersCloseTwice(Sabotage):
    def response(self, response: Any) -> Iterable[Any]:
        return [response, response] if isinstance(response, ModelClosed) else [response]


class EndsWithoutAWord(Sabotage):
    """Ends the stream instead of answering, once a route has been closed."""

    has_closed = False

    def early(self, request: Any) -> Iterable[Any]:
        had_closed, self.has_closed = self.has_closed, self.has_closed or _is_end(request)
        return [None] if had_closed else []


def _is_end(request: Any) -> bool:
    return isinstance(request, CloseRoute)


def without_concurrency(answer: HandshakeResponse) -> HandshakeResponse:
    """Return ``answer`` of a server that keeps the order of arrival."""
    kept = {
        key: value
        for key, value in answer.capabilities.items()
        if key != capabilities.CONCURRENT_PREDICT
    }
    return replace(answer, capabilities=kept)


SABOTEURS: dict[str, type[Sabotage]] = {
    **COMMON,
    "model.establishment": HasAContract,
    "route.configure-first": CallsItInvalid,
    "route.contract-fixed": HasOneContractForAllRoutes,
    "route.close": KeepsRoutesOpen,
    "predict.observation": PredictsForAnything,
    "predict.context": ForgetsTheSession,
    "predict.actions": GivesAnActionTooMany,
    "model.one-response": RepeatsPredictions,
    "model.in-band": SaysNothingAboutErrors,
    "model.recoverable": GivesUpAfterAnError,
    "model.arrival": HidesThatItSwaps,
    "model.route-order": SwapsPredictions,
    "model.close-drains": ClosesAtOnce,
}

OTHERS: list[tuple[str, type[Sabotage]]] = [
    ("model.establishment", AnswersTheHandshakeWithNoise),
    ("route.contract-fixed", ForgetsARouteThatIsConfiguredAgain),
    ("predict.context", ReordersMirroredSlots),
    ("predict.actions", ActsOutsideTheSpace),
    ("predict.actions", ReversesTheActions),
    ("model.close-drains", AnswersCloseTwice),
    ("model.close-drains", EndsWithoutAWord),
    ("session.refusal", SelectsAnEditionWhileRefusing),
    ("wire.pin", ShowsNoChecksum),
    ("wire.pin", ShowsTheChecksumOfAnotherText),
    ("session.highest-edition", RefusesANewerClient),
]
"""More ways to break a clause."""
