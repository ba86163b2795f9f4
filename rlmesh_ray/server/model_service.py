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

from rlmesh_ray.errors import (
    CodecError,
    ConformanceError,
    ContractMismatchError,
    PolicyError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
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
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.reception import HouseRules, Reception
from rlmesh_ray.spaces.batch import Column, leaves
from rlmesh_ray.spaces.conformance import Policy, check
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import model as wire
from rlmesh_ray.wire.rlmesh_v1 import values

_LOG = logging.getLogger(__name__)

SERVICE = "rlmesh.model.v1.ModelService"
_ABLE = {
    capabilities.MODEL_SERVICE: "",
    capabilities.CONCURRENT_PREDICT: "",
    capabilities.SPACES_CORE: "",
}

MAX_UNANSWERED = 256
"""Requests of one session that are read before earlier ones have been answered and taken."""


class ModelService:
    """Answers the three calls of ModelService.

    Args:
        host: Runs the policy.
        rules: What clients may do.
        drain: The endpoint's.
    """

    def __init__(self, host: ModelHost, rules: HouseRules, drain: Drain) -> None:
        self._host = host
        self._on_close = rules.on_close
        self._drain = drain
        self._reception = Reception(wire, _ABLE, rules)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        return self._reception.handlers(SERVICE, self.join)

    async def join(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Serve one session: each request answered once, each route's in order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        conversation = _Conversation(self._host, self._drain)
        reader = asyncio.ensure_future(conversation.read(requests))
        try:
            while not conversation.is_closed:
                response = await conversation.outbox.get()
                if response is None:
                    break
                conversation.is_closed = isinstance(response, ModelClosed)
                yield wire.pack_response(response)
                conversation.note_taken()
        finally:
            reader.cancel()
            # Also when the client has gone as soon as it had its answer.
            if conversation.is_closed and self._on_close is not None:
                self._on_close()
            # The stream's own cancellation must not cut the release short.
            await asyncio.shield(asyncio.ensure_future(conversation.release()))


class _Conversation:
    """One Join stream."""

    def __init__(self, host: ModelHost, drain: Drain) -> None:
        self.outbox: asyncio.Queue[ModelResponse | None] = asyncio.Queue()
        """Responses to send; None after the last one."""
        self.is_closed = False
        """Whether Close has been answered."""
        self._host = host
        self._drain = drain
        self._session = ModelSession()
        self._key = uuid.uuid4().hex
        self._contracts: dict[str, EnvContract] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._num_owed = 0
        self._is_reading = True
        self._taken = asyncio.Event()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Take requests until the client sends no more, or the endpoint wants to stop."""
        try:
            async for data in requests:
                self._num_owed += 1
                self._drain.owe()
                self._follow(self._session.receive(wire.parse_request(data)))
                while self._num_owed >= MAX_UNANSWERED:
                    # A client that only sends shall wait, not fill this process's memory.
                    self._taken.clear()
                    await self._taken.wait()
                if self._drain.is_wanted:
                    break
        finally:
            self._is_reading = False
            self._end_if_done()

    def note_taken(self) -> None:
        """Note that a response has been sent."""
        self._num_owed -= 1
        self._drain.settle()
        self._taken.set()

    async def release(self) -> None:
        """Drop what is unfinished and free the routes."""
        self._drain.settle(self._num_owed)
        working = tuple(self._working)
        for task in working:
            task.cancel()
        # Else one of them could still hand the policy rows of a route that is forgotten below.
        await asyncio.gather(*working, return_exceptions=True)
        for route_id in list(self._contracts):
            try:
                await self._host.forget(self._route_key(route_id))
            except PolicyError as error:  # nobody is there any more whom it would concern
                _LOG.warning("the policy failed: %s", error)

    def _follow(self, todo: Todo) -> None:
        for response in todo.responses:
            self.outbox.put_nowait(response)
        for request in todo.ready:
            task = asyncio.ensure_future(self._work(request))
            self._working.add(task)
            task.add_done_callback(self._working.discard)
        self._end_if_done()

    def _end_if_done(self) -> None:
        """End the stream when nothing comes in any more and nothing is outstanding."""
        if not self._is_reading and not self._session.num_outstanding:
            self.outbox.put_nowait(None)

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
        _check_observation(contract, columns)
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


def _check_observation(contract: EnvContract, columns: list[Column]) -> None:
    """Refuse what is in no space: a policy would make nonsense of it, or remember it."""
    try:
        check(leaves(contract.observation_space), columns, Policy.OFF)
    except ConformanceError as error:
        raise CodecError(
            f"the observation does not fit {contract.id}'s observation space: {error}"
        ) from error


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
