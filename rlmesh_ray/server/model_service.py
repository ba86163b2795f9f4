"""The shell of ModelService: bytes in, session, host, bytes out.

Requests of different routes are worked on at once and answered in completion order
(capability rlmesh.model.concurrent_predict.v1).
"""

import asyncio
import logging
import traceback
import uuid
from collections.abc import AsyncIterator, Sequence

import grpc

from rlmesh_ray import __version__
from rlmesh_ray.errors import CodecError, ContractMismatchError, PolicyError, RlmeshError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import answer_offer
from rlmesh_ray.protocol.messages import (
    CloseRoute,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    ModelResponse,
    Predict,
    Predicted,
    PredictSlot,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
)
from rlmesh_ray.protocol.model_session import ModelSession, Todo
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.offers import Offers
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

_LOG = logging.getLogger(__name__)

SERVICE = "rlmesh.model.v1.ModelService"

MAX_UNANSWERED = 256
"""Requests of one session that are read before earlier ones have been answered and taken."""


class ModelService:
    """Answers the three calls of ModelService.

    Args:
        host: Runs the policy.
    """

    def __init__(self, host: ModelHost) -> None:
        self._host = host
        self._offers = Offers()

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Handshake": grpc.unary_unary_rpc_method_handler(self.handshake),
                "Join": grpc.stream_stream_rpc_method_handler(self.join),
                "Shutdown": grpc.unary_unary_rpc_method_handler(self.shutdown),
            },
        )

    async def handshake(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Negotiate the edition."""
        try:
            offer = wire.parse_offer(data)
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        answer = answer_offer(
            offer,
            server_version=__version__,
            capabilities={
                capabilities.MODEL_SERVICE: "",
                capabilities.CONCURRENT_PREDICT: "",
                capabilities.SPACES_CORE: "",
                capabilities.SESSION: self._offers.remember(offer),
            },
        )
        return wire.pack_answer(answer)

    async def join(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Serve one session: each request answered once, each route's in order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        conversation = _Conversation(self._host)
        reader = asyncio.ensure_future(conversation.read(requests))
        try:
            while True:
                response = await conversation.outbox.get()
                if response is None:
                    break
                yield wire.pack_response(response)
                conversation.taken.set()
                if isinstance(response, ModelClosed):
                    break
        finally:
            reader.cancel()
            # The stream's own cancellation must not cut the release short.
            await asyncio.shield(asyncio.ensure_future(conversation.release()))

    async def shutdown(self, data: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        """Refuse: an endpoint is ended by whoever started it."""
        _LOG.info("remote Shutdown refused")
        return wire.pack_shutdown_response(
            accepted=False, message="remote shutdown is disabled on this endpoint"
        )


class _Conversation:
    """One Join stream."""

    def __init__(self, host: ModelHost) -> None:
        self.outbox: asyncio.Queue[ModelResponse | None] = asyncio.Queue()
        self.taken = asyncio.Event()
        """Set by whoever sends, after each response."""
        self._host = host
        self._session = ModelSession()
        self._key = uuid.uuid4().hex
        self._contracts: dict[str, EnvContract] = {}
        self._working: set[asyncio.Task[None]] = set()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Take requests until the client sends no more."""
        try:
            async for data in requests:
                self._follow(self._session.receive(wire.parse_request(data)))
                while self._session.num_outstanding + self.outbox.qsize() >= MAX_UNANSWERED:
                    # A client that only sends shall wait, not fill this process's memory.
                    self.taken.clear()
                    await self.taken.wait()
        finally:
            # The client is gone without Close: there is nobody to answer.
            self.outbox.put_nowait(None)

    async def release(self) -> None:
        """Drop what is unfinished and free the routes."""
        working = tuple(self._working)
        for task in working:
            task.cancel()
        # Else one of them could still hand the policy rows of a route that is forgotten below.
        await asyncio.gather(*working, return_exceptions=True)
        for route_id in list(self._contracts):
            await self._host.forget(self._route_key(route_id))

    def _follow(self, todo: Todo) -> None:
        for response in todo.responses:
            self.outbox.put_nowait(response)
        for request in todo.ready:
            task = asyncio.ensure_future(self._work(request))
            self._working.add(task)
            task.add_done_callback(self._working.discard)

    async def _work(self, request: RouteRequest) -> None:
        try:
            response = await self._answer(request)
        except RlmeshError as error:
            response = _failed(request, error)
        except Exception as error:  # noqa: BLE001  # a policy's fault must not end the session
            response = _failed(request, error)
        self._follow(self._session.complete(request, response))

    async def _answer(self, request: RouteRequest) -> ModelResponse:
        match request:
            case ConfigureRoute():
                return await self._configure(request)
            case Predict():
                return await self._predict(request)
            case CloseRoute():
                self._contracts.pop(request.context.route_id)
                await self._host.forget(self._route_key(request.context.route_id))
                return RouteClosed(request.request_id)
        raise AssertionError(f"the session lets no {type(request).__name__} through")

    async def _configure(self, request: ConfigureRoute) -> ModelResponse:
        if not isinstance(request.contract, EnvContract):
            raise ContractMismatchError("ConfigureRoute came without an environment contract")
        await self._host.configure(request.contract)
        route_id = request.context.route_id
        if route_id in self._contracts:  # configured anew: what was remembered is another's
            await self._host.forget(self._route_key(route_id))
        self._contracts[route_id] = request.contract
        return RouteConfigured(request.request_id)

    async def _predict(self, request: Predict) -> ModelResponse:
        contract = self._contracts[request.context.route_id]
        slots = request.context.slots
        _check_slots(slots, contract)
        columns = values.decode_batch(contract.observation_space, request.observation, len(slots))
        actions = await self._host.predict(
            self._route_key(request.context.route_id), contract, columns, slots
        )
        data = values.encode_batch(contract.action_space, actions, len(slots))
        return Predicted(request.request_id, request.context, data)

    def _route_key(self, route_id: str) -> str:
        return f"{self._key}/{route_id}"


def _check_slots(slots: Sequence[PredictSlot], contract: EnvContract) -> None:
    """Refuse slots that would make the policy's state ambiguous, or grow without bound."""
    if not slots:
        raise CodecError("Predict names no slots; give one a row of the observation")
    lanes = {slot.env_index for slot in slots}
    if len(lanes) < len(slots):
        raise CodecError("Predict names an env_index twice; each slot needs one of its own")
    if min(lanes) < 0 or max(lanes) >= contract.num_envs:
        raise CodecError(
            f"Predict names env_index {min(lanes)} to {max(lanes)}; the route's contract has "
            f"num_envs = {contract.num_envs}"
        )


def _failed(request: RouteRequest, error: Exception) -> ModelFailed:
    """Say in band what went wrong; the session goes on."""
    is_callers_fault = isinstance(error, CodecError | ContractMismatchError)
    code = ModelErrorCode.INVALID_REQUEST if is_callers_fault else ModelErrorCode.INTERNAL
    known = isinstance(error, RlmeshError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    trace = "" if is_callers_fault else "".join(traceback.format_exception(error))
    if isinstance(error, PolicyError) or not known:
        _LOG.warning("the policy failed: %s", message)
    return ModelFailed(request.request_id, code, message, is_recoverable=True, debug_info=trace)
