"""The shell of ModelService: bytes in, session, host, bytes out.

Requests of different routes are worked on at once and answered in completion order
(capability rlmesh.model.concurrent_predict.v1).
"""

import asyncio
import contextlib
import logging
import traceback
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import grpc

from rlmesh_ray.errors import (
    CapacityError,
    CodecError,
    ContractMismatchError,
    RlmeshError,
)
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import (
    BatchRun,
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
from rlmesh_ray.server.error_text import clipped, text_of
from rlmesh_ray.server.model_host import ModelHost, Ticket
from rlmesh_ray.server.outbox import Outbox
from rlmesh_ray.server.reception import HouseRules, Reception
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import model as wire

_LOG = logging.getLogger(__name__)

SERVICE = "rlmesh.model.v1.ModelService"
_ABLE = {
    capabilities.MODEL_SERVICE: "",
    capabilities.CONCURRENT_PREDICT: "",
    capabilities.SPACES_CORE: "",
}

MAX_UNANSWERED = 256
"""Requests of one session that are read before earlier ones have been answered and taken."""
MAX_ROUTES = 1024
"""Routes of one session; each keeps its contract in memory."""
MAX_LANES = 2**16
"""Lanes of all routes of one session together. A policy may remember something about each of them,
and a client can claim any number of lanes in one request."""

_MOST_TRACE_CHARACTERS = 2**16
_FAULT = "this session has come upon a fault of the server, which its log tells; open another one"


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

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: each request answered once, each route's in order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        conversation = _Conversation(self._host, self._drain)
        reader = asyncio.ensure_future(conversation.read(requests))
        try:
            while (frame := await conversation.outbox.get()) is not None:
                await context.write(frame)
                conversation.note_taken()
            if conversation.has_failed:
                await context.abort(grpc.StatusCode.INTERNAL, _FAULT)
        finally:
            reader.cancel()
            # Also when the client has gone as soon as it had its answer.
            if conversation.is_closed and self._on_close is not None:
                self._on_close()
            # The stream's own cancellation must not cut the release short.
            await asyncio.shield(asyncio.ensure_future(conversation.release()))


class _Route(NamedTuple):
    key: str
    """Its name over all sessions of the server."""
    contract: EnvContract


class _Conversation:
    """One Join stream."""

    def __init__(self, host: ModelHost, drain: Drain) -> None:
        self.outbox = Outbox()
        """Frames to send; None after the last one."""
        self.is_closed = False
        """Whether Close has been answered."""
        self.has_failed = False
        """Whether a fault of this package has ended it: not every request will be answered."""
        self._host = host
        self._drain = drain
        self._session = ModelSession()
        self._key = uuid.uuid4().hex
        self._routes: dict[str, _Route] = {}
        self._num_lanes: dict[str, int] = {}
        """Of the routes that are there, and of those about to be."""
        self._predicting: dict[str, Ticket] = {}
        self._working: set[asyncio.Task[None]] = set()
        self._num_owed = 0
        self._num_untaken = 0
        self._is_reading = True
        self._is_released = False
        self._taken = asyncio.Event()

    async def read(self, requests: AsyncIterator[bytes]) -> None:
        """Take requests until the client sends no more, or the endpoint wants to stop."""
        try:
            async for data in requests:
                self._num_owed += 1
                self._drain.owe()
                self._num_untaken += 1
                self._host.soon(self._take, data)
                while self._num_owed >= MAX_UNANSWERED:
                    # A client that only sends shall wait, not fill this process's memory.
                    self._taken.clear()
                    await self._taken.wait()
                if self._drain.is_wanted:
                    break
        finally:
            self._is_reading = False
            self._end_if_done()

    def _take(self, data: bytes) -> None:
        """Work on a request; together with those of other streams that came at the same time."""
        if self._is_released:
            return
        self._num_untaken -= 1
        try:
            self._follow(self._session.receive(wire.parse_request(data)))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    def note_taken(self) -> None:
        """Note that a response has been sent."""
        self._num_owed -= 1
        self._drain.settle()
        self._taken.set()

    async def release(self) -> None:
        """Drop what is unfinished and free the routes."""
        self._is_released = True
        self._drain.settle(self._num_owed)
        for ticket in self._predicting.values():
            self._host.cancel(ticket)
        working = tuple(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for route in tuple(self._routes.values()):
            try:
                # After the batch that may be running with rows of the route.
                await self._host.abandon(route.key)
            except asyncio.CancelledError:  # the endpoint has stopped, and the policy with it
                return

    def _fail(self) -> None:
        """End the session, from within the handling of an error that should not have come up."""
        _LOG.exception("a model session has failed; please report this")
        self.has_failed = True
        self.outbox.put(None)

    def _follow(self, todo: Todo) -> None:
        """Do what the session says, and what follows from that."""
        following = [todo]
        for todo in following:  # which may grow on the way
            for response in todo.responses:
                self.outbox.put(wire.pack_response(response))
                if isinstance(response, ModelClosed):
                    self.is_closed = True
                    self.outbox.put(None)
            for request in todo.ready:
                failed = self._begin(request)
                if failed is not None:
                    following.append(self._session.complete(request, failed))
        self._end_if_done()

    def _end_if_done(self) -> None:
        """End the stream when nothing comes in any more and nothing is outstanding."""
        if not (self._is_reading or self._num_untaken or self._session.num_outstanding):
            self.outbox.put(None)

    def _begin(self, request: RouteRequest) -> ModelFailed | None:
        """Set to work; what fails at once is answered at once."""
        if not isinstance(request, Predict):
            task = asyncio.ensure_future(self._work(request))
            self._working.add(task)
            task.add_done_callback(self._working.discard)
            return None
        # No task for each of these: it would cost as much as the rest together.
        context = request.context
        key, contract = self._routes[context.route_id]
        slots = context.slots
        try:
            _check_slots(slots, contract)
        except CodecError as error:
            return _failed(request, error)
        self._predicting[request.request_id] = self._host.predict(
            key,
            contract,
            request.observation,
            slots,
            partial(self._finish_predict, request),
        )
        return None

    def _finish_predict(
        self, request: Predict, result: bytes | RlmeshError, run: BatchRun, queue_ns: int
    ) -> None:
        if self._is_released:
            return
        del self._predicting[request.request_id]
        response: ModelResponse
        try:
            if isinstance(result, bytes):
                response = Predicted(
                    request.request_id, request.context, result, run, queue_ns, request.mirror
                )
            else:
                response = _failed(request, result)
            self._follow(self._session.complete(request, response))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    async def _work(self, request: RouteRequest) -> None:
        try:
            try:
                response = await self._answer(request)
            except RlmeshError as error:
                response = _failed(request, error)
            self._follow(self._session.complete(request, response))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    async def _answer(self, request: RouteRequest) -> ModelResponse:
        if isinstance(request, ConfigureRoute):
            return await self._configure(request)
        route_id = request.context.route_id
        await self._host.forget(self._routes[route_id].key)
        # Not before: whoever releases the session meanwhile has to forget the route.
        del self._routes[route_id], self._num_lanes[route_id]
        return RouteClosed(request.request_id)

    async def _configure(self, request: ConfigureRoute) -> ModelResponse:
        if not isinstance(request.contract, EnvContract):
            raise ContractMismatchError("ConfigureRoute came without an environment contract")
        route_id = request.context.route_id
        if self._session.num_routes > MAX_ROUTES:
            raise CapacityError(
                f"the session has {MAX_ROUTES} routes, which is the limit: close one first, or "
                "open another session"
            )
        key = f"{self._key}/{route_id}"
        with self._room_for(route_id, request.contract.num_envs):
            if route_id in self._routes:
                await self._host.reconfigure(key, request.contract)
            else:
                await self._host.configure(request.contract)
        self._routes[route_id] = _Route(key, request.contract)
        return RouteConfigured(request.request_id)

    @contextlib.contextmanager
    def _room_for(self, route_id: str, num_lanes: int) -> Iterator[None]:
        """Count a route's lanes, unless the context raises."""
        before = self._num_lanes.get(route_id, 0)
        total = sum(self._num_lanes.values()) - before + num_lanes
        if total > MAX_LANES:
            raise CapacityError(
                f"the session's routes would have {total} lanes, and {MAX_LANES} are the limit: "
                "close a route first, or open another session"
            )
        self._num_lanes[route_id] = num_lanes
        try:
            yield
        except BaseException:
            self._num_lanes[route_id] = before
            if not before:
                del self._num_lanes[route_id]
            raise


def _check_slots(slots: Sequence[PredictSlot], contract: EnvContract) -> None:
    """Refuse slots that would make the policy's state ambiguous, or grow without bound."""
    if len(slots) == 1 and 0 <= slots[0].env_index < contract.num_envs:
        return
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


_CODES: Mapping[type[RlmeshError], ModelErrorCode] = {
    CodecError: ModelErrorCode.INVALID_REQUEST,
    ContractMismatchError: ModelErrorCode.INVALID_REQUEST,
    CapacityError: ModelErrorCode.BUSY,
}
"""Whatever is not here is the policy's fault."""


def _failed(request: RouteRequest, error: RlmeshError) -> ModelFailed:
    """Say in band what went wrong; the session goes on."""
    code = _CODES.get(type(error), ModelErrorCode.INTERNAL)
    trace = ""
    if code is ModelErrorCode.INTERNAL:
        trace = clipped("".join(traceback.format_exception(error)), _MOST_TRACE_CHARACTERS)
        _LOG.warning("the policy failed: %s", text_of(error))
    return ModelFailed(
        request.request_id, code, text_of(error), is_recoverable=True, debug_info=trace
    )
