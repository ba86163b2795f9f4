"""One Join stream of a model endpoint: bytes in, dialect, session, batcher, dialect, bytes out.

It keeps the session's routes, within the limits of their number and lanes.

Requests of different routes are worked on at once and answered in completion order
(capability rlmesh.model.concurrent_predict.v1). Predictions of all routes share the policy's thread
and its batches; to configure or close one route does not wait for another one's batch.
"""

import asyncio
import itertools
import logging
import os
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import CapacityError, CodecError, ContractMismatchError, RlmeshError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.polling import AdaptiveSpin
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.messages import (
    MAX_ID_CHARACTERS,
    BatchRun,
    ConfigureRoute,
    ModelClosed,
    ModelErrorCode,
    ModelFailed,
    Predict,
    Predicted,
    RouteClosed,
    RouteConfigured,
    RouteRequest,
)
from rlmesh_ray.protocol.model_session import (
    EDITION_2026_06_RULES,
    ContractLanes,
    EpisodesForgotten,
    ForgetEpisodes,
    ModelRules,
    ModelSession,
    RouteLanes,
    SessionEvent,
    SessionResponse,
)
from rlmesh_ray.server.endpoint.calls import clipped, text_of
from rlmesh_ray.server.endpoint.gate import Drain
from rlmesh_ray.server.endpoint.handshake_service import GenerationHandshake
from rlmesh_ray.server.endpoint.log import current, logged_as
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.prediction_batch import Actions, PredictionRequest, Route
from rlmesh_ray.server.observe.counters import SessionCounters
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire import image_codec_v1
from rlmesh_ray.wire.protobuf import MAX_LANES
from rlmesh_ray.wire.rlmesh_v1 import model as edition
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.values import ContractCodecs

_LOG = logging.getLogger(__name__)

_MOST_TRACE_CHARACTERS = 2**16

_CODES: Mapping[type[RlmeshError], ModelErrorCode] = {
    CodecError: ModelErrorCode.INVALID_REQUEST,
    ContractMismatchError: ModelErrorCode.INVALID_REQUEST,
    CapacityError: ModelErrorCode.BUSY,
}
"""Codes of errors that are not the policy's fault."""


def failure_response(request_id: str, error: RlmeshError) -> ModelFailed:
    """Return the answer to a failed request; a policy's fault is logged, and has its traceback."""
    code = _CODES.get(type(error), ModelErrorCode.INTERNAL)
    trace = ""
    if code is ModelErrorCode.INTERNAL:
        trace = clipped("".join(traceback.format_exception(error)), _MOST_TRACE_CHARACTERS)
        _LOG.warning("the policy failed: %s", text_of(error))
    return ModelFailed(request_id, code, text_of(error), is_recoverable=True, debug_info=trace)


class ModelServerDialect(Protocol):
    """One stream's dialect; made without arguments, and used in the serving loop only."""

    handshake_frames: ClassVar[HandshakeFrames]
    handshake: ClassVar[GenerationHandshake | None]
    """None for the edition's generation."""
    capabilities: ClassVar[Mapping[str, str]]
    """What an endpoint of a policy can do beyond the edition, in the generation's terms."""
    rules: ClassVar[ModelRules]

    def receive(self, session: ModelSession, frame: bytes) -> list[SessionEvent]:
        """Pass the requests in a frame to the session; return what follows, in this order."""

    def frame(self, response: SessionResponse) -> bytes | None:
        """Return the frame that a response completes; None: it completes none yet.

        There is one frame for each that has come in.
        """

    def lanes(self, contract: EnvContract) -> RouteLanes:
        """Return the lanes of a route that is to be configured."""

    def codecs(self, contract: EnvContract) -> ContractCodecs:
        """Return the codecs of a route that is to be configured.

        Raises:
            ContractMismatchError: The contract names an encoding that does not fit its spaces.
        """


class EditionModelServerDialect:
    """``rlmesh.protocol.v1``, whose requests are those of the session."""

    handshake_frames: ClassVar[HandshakeFrames] = edition.HANDSHAKE
    handshake = None
    capabilities: ClassVar[Mapping[str, str]] = {
        capabilities.MODEL_SERVICE: "",
        capabilities.CONCURRENT_PREDICT: "",
        capabilities.SPACES_CORE: "",
    }
    rules = EDITION_2026_06_RULES

    def __init__(self) -> None:
        # Not a method: that would cost a further call for each message.
        self.frame: Callable[[Any], bytes] = edition.pack_response

    def receive(self, session: ModelSession, frame: bytes) -> list[SessionEvent]:
        return session.receive(edition.parse_request(frame))

    def lanes(self, contract: EnvContract) -> RouteLanes:
        return ContractLanes(contract.num_envs)

    def codecs(self, contract: EnvContract) -> ContractCodecs:
        return image_codec_v1.route_codecs(contract)


def load_model_dialects() -> dict[str, type[ModelServerDialect]]:
    """Return the dialects of ModelService, by generation; the first is the edition's."""
    return {
        PROTOCOL_V1: EditionModelServerDialect,
        **registry.load_generations("server.model_dialect"),
    }


MAX_ROUTES = 1024
"""Routes of one session; each keeps its contract in memory."""
_NUMBERS = itertools.count()
"""Of the routes of all sessions, also of those that have ended."""


class ModelRoutes:
    """The routes of one session. To be used in the serving loop only.

    Args:
        batcher: Runs the policy.
        make_lanes: See ``ModelServerDialect.lanes``.
        choose_codecs: See ``ModelServerDialect.codecs``.
        keeps_same: See ``ModelRules.keeps_same_route``.
    """

    def __init__(
        self,
        batcher: Batcher,
        make_lanes: Callable[[EnvContract], RouteLanes],
        choose_codecs: Callable[[EnvContract], ContractCodecs],
        *,
        keeps_same: bool,
    ) -> None:
        self.by_id: dict[str, Route] = {}
        """The open routes."""
        self._batcher = batcher
        self._make_lanes = make_lanes
        self._choose_codecs = choose_codecs
        self._keeps_same = keeps_same
        self._names = current()
        self._ending: set[asyncio.Future[None]] = set()
        """Done when the policy has forgotten a route that has ended."""
        self._num_lanes = 0
        """Lanes of the open routes, and of those that are being opened."""

    async def configure(
        self, route_id: str, contract: object, horizon: int, num_routes: int
    ) -> None:
        """Open a route, or restart an open one.

        Args:
            route_id: The client's name for it.
            contract: An ``EnvContract``, if that in the request is valid.
            horizon: How many actions of each chunk the client wants; ignored where the policy
                chooses one at a time.
            num_routes: Routes of the session, with this one and others that are being opened.

        Raises:
            ContractMismatchError: The policy cannot act there, or its chunks are shorter than
                ``horizon``, or there is no contract, or it names an encoding that does not fit its
                spaces.
            CodecError: The route's name is too long.
            CapacityError: The session would have too many routes, or too many lanes.
        """
        if not isinstance(contract, EnvContract):
            raise ContractMismatchError("ConfigureRoute came without an environment contract")
        if len(route_id) > MAX_ID_CHARACTERS:
            raise CodecError(
                f"the route's name has {len(route_id)} characters, and {MAX_ID_CHARACTERS} are the "
                "limit: choose a shorter one"
            )
        if num_routes > MAX_ROUTES:
            raise CapacityError(
                f"the session has {MAX_ROUTES} routes, which is the limit: close one first, or "
                "open another session"
            )
        policy_horizon = self._batcher.horizon
        if 1 < policy_horizon < horizon:
            raise ContractMismatchError(
                f"the route wants {horizon} actions at once, and the policy chooses "
                f"{policy_horizon}: lower the horizon to {policy_horizon} or less"
            )
        horizon = min(horizon, policy_horizon)
        before = self.by_id.get(route_id)
        if (
            before is not None
            and self._keeps_same
            and before.horizon == horizon
            and _are_same_environment(contract, before.contract)
        ):
            return
        lanes, codecs = self._make_lanes(contract), self._choose_codecs(contract)
        # A new key each time: the policy may still have to forget the route that has ended.
        key = f"{next(_NUMBERS)}/{route_id}"
        route = Route(key, contract, codecs, lanes, policy_horizon, horizon)
        num_lanes = lanes.num_reserved
        num_others = self._num_lanes - (0 if before is None else before.lanes.num_reserved)
        if num_others + num_lanes > MAX_LANES:
            raise CapacityError(
                f"the session's routes would have {num_others + num_lanes} lanes, and {MAX_LANES} "
                "are the limit: close a route first, or open another session"
            )
        self._num_lanes += num_lanes
        try:
            while num_routes + len(self._ending) > MAX_ROUTES:
                # A client that opens and closes without end must wait, or it would fill the memory.
                await asyncio.wait(self._ending, return_when=asyncio.FIRST_COMPLETED)
            await self._batcher.configure(contract)
        except BaseException:
            self._num_lanes -= num_lanes
            raise
        self.by_id[route_id] = route
        if before is not None:
            self._end(before)

    async def forget(self, route_id: str, episode_ids: Sequence[str]) -> None:
        """Forget episodes of a route, if it is open.

        Raises:
            RlmeshError: The policy could not; the episodes keep their lanes.
        """
        route = self.by_id.get(route_id)
        if route is None:
            return
        lanes = route.lanes.lanes_of(episode_ids)
        if lanes:
            await self._batcher.forget_lanes(route.key, lanes)
            route.lanes.free(episode_ids)

    def close(self, route_id: str) -> None:
        """End a route, if it is open; the policy forgets it later, by a call in its thread."""
        route = self.by_id.pop(route_id, None)
        if route is not None:
            self._end(route)

    async def abandon(self) -> None:
        """End all routes with the session, and wait until the policy has forgotten them."""
        for route_id in tuple(self.by_id):
            self.close(route_id)
        if self._ending:
            # The policy does so after a running batch with their rows; or the endpoint has stopped.
            await asyncio.wait(self._ending)

    def _end(self, route: Route) -> None:
        self._num_lanes -= route.lanes.num_reserved
        route.lanes.clear()
        forgetting = self._batcher.forget(route.key)
        self._ending.add(forgetting)
        forgetting.add_done_callback(self._note_forgotten)

    def _note_forgotten(self, forgetting: "asyncio.Future[None]") -> None:
        self._ending.discard(forgetting)
        error = None if forgetting.cancelled() else forgetting.exception()
        if error is not None:
            with logged_as(*self._names):
                _LOG.warning("the policy failed to forget a route: %s", text_of(error))


def _are_same_environment(one: EnvContract, other: EnvContract) -> bool:
    # Their metadata may hold arrays, whose comparison is not a bool.
    return (one.id, one.observation_space, one.action_space) == (
        other.id,
        other.observation_space,
        other.action_space,
    )


_LONGEST_SPIN_S = 0.001


class BusyPolledFrames:
    """The messages of a stream; while the next one is due, the loop does not sleep.

    Not a generator: an abandoned one is closed in a separate task.

    Args:
        frames: The messages of one stream.
        counts: Counts the sessions: other clients would wait for the processor meanwhile.
    """

    def __init__(self, frames: AsyncIterator[bytes], counts: SessionCounters) -> None:
        self._frames = aiter(frames)
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._spin = AdaptiveSpin(_LONGEST_SPIN_S)
        self._until_s = 0.0
        self._is_awake = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._counts.num_open > 1:
            return await anext(self._frames)
        spin = self._spin
        spin.begin()
        if spin.spin_s:
            # Also for the answer to the last message, which wakes the loop when it has left.
            self._until_s = time.perf_counter() + spin.spin_s
            if not self._is_awake:
                self._is_awake = True
                self._loop.call_soon(self._turn)
        frame = await anext(self._frames)
        spin.learn()
        return frame

    def _turn(self) -> None:
        """Keep the loop awake, for as long as the client usually takes to ask again."""
        if time.perf_counter() < self._until_s:
            os.sched_yield()
            self._loop.call_soon(self._turn)
        else:
            self._is_awake = False


MAX_UNANSWERED = 256
"""Unanswered requests of one session, above which no more are read."""


class ModelStream:
    """The requests and answers of one stream. To be used in the serving loop only.

    Args:
        batcher: Runs the policy.
        drain: Counts the pending requests of the endpoint.
        dialect: A new object of the stream's dialect.
    """

    def __init__(self, batcher: Batcher, drain: Drain, dialect: ModelServerDialect) -> None:
        self.has_failed = False
        """Whether a fault of this package has ended it: not every request will be answered."""
        self.num_predicted = 0
        """Predictions that were answered with actions."""
        self._batcher = batcher
        # Requests of all streams are taken together, in the context of the first one.
        self._names = current()
        self._drain = drain
        # Each message uses these: an attribute lookup every time would be measurable.
        self._receive, self._frame = dialect.receive, dialect.frame
        self._session = ModelSession(dialect.rules)
        self._routes = ModelRoutes(
            batcher, dialect.lanes, dialect.codecs, keeps_same=dialect.rules.keeps_same_route
        )
        self._outbox: deque[bytes | None] = deque()
        """Frames to send; None after the last one."""
        # A queue of asyncio's would cost each frame several calls.
        self._writer: asyncio.Future[None] | None = None
        """Done when there is something to send."""
        self._predicting: set[PredictionRequest] = set()
        self._working: set[asyncio.Task[None]] = set()
        # The stream's first frame is pending from now on.
        self._num_untaken = 1
        self.num_pending = 1
        """Requests that were received, and whose answers have not been sent."""
        drain.begin_request()
        self._is_reading = True
        self._is_released = False
        self._taken = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._session.is_closed

    async def read(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        """Take requests until the client sends no more, or the endpoint wants to stop."""
        try:
            self._batcher.submit(self._take, first)
            del first
            if self._drain.is_draining:
                return
            async for frame in rest:
                self.num_pending += 1
                self._drain.begin_request()
                self._num_untaken += 1
                self._batcher.submit(self._take, frame)
                if not (self._num_untaken or self._predicting):
                    # It has been answered at once: the answer is sent before the next read.
                    await asyncio.sleep(0)
                while self.num_pending >= MAX_UNANSWERED:
                    # A client that only sends must wait, or it would fill this process's memory.
                    self._taken.clear()
                    await self._taken.wait()
                if self._drain.is_draining:
                    break
        finally:
            self._is_reading = False
            self._end_if_done()

    def _take(self, frame: bytes) -> None:
        """Work on a request; together with those of other streams that came at the same time."""
        if self._is_released:
            return
        self._num_untaken -= 1
        try:
            self._follow(self._receive(self._session, frame))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._outbox:
                frame = self._outbox.popleft()
                if frame is None:
                    return
                await context.write(frame)
                self.num_pending -= 1
                self._drain.end_request()
                self._taken.set()
            self._writer = loop.create_future()
            await self._writer

    def _send(self, frame: bytes | None) -> None:
        self._outbox.append(frame)
        if self._writer is not None and not self._writer.done():
            self._writer.set_result(None)

    async def release(self) -> None:
        self._is_released = True
        self._drain.end_request(self.num_pending)
        for prediction in self._predicting:
            self._batcher.cancel(prediction)
        working = tuple(self._working)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        await self._routes.abandon()

    def _fail(self) -> None:
        with logged_as(*self._names):
            _LOG.exception("a model session has failed; please report this")
        self.has_failed = True
        self._send(None)

    def _follow(self, following: list[SessionEvent]) -> None:
        """Send the session's responses, begin its requests, and so on with their results."""
        for event in following:  # which may grow on the way
            if isinstance(event, RouteRequest):
                refusal = self._begin(event)
                if refusal is not None:
                    following += self._session.complete(event, refusal)
                continue
            frame = self._frame(event)
            if frame is not None:
                self._send(frame)
            if isinstance(event, ModelFailed):
                self._batcher.sessions.errors[event.code.name] += 1
            elif isinstance(event, ModelClosed):
                self._send(None)
        if not self._is_reading:
            self._end_if_done()

    def _end_if_done(self) -> None:
        if not (self._is_reading or self._num_untaken or self._session.num_outstanding):
            self._send(None)

    def _begin(self, request: RouteRequest) -> ModelFailed | None:
        """Begin a request; return the answer of one that fails at once."""
        if not isinstance(request, Predict):
            task = asyncio.ensure_future(self._work(request))
            self._working.add(task)
            task.add_done_callback(self._working.discard)
            return None
        # No task for each of these: it would cost as much as the rest together.
        context = request.context
        route = self._routes.by_id[context.route_id]
        try:
            slots = route.lanes.assign_lanes(context.slots)
        except (CapacityError, CodecError) as error:
            return self._failed(request, error)
        prediction = PredictionRequest(
            route, request.observation, slots, partial(self._finish_predict, request)
        )
        if self._batcher.predict(prediction):
            self._predicting.add(prediction)
        return None

    def _finish_predict(
        self,
        request: Predict,
        prediction: PredictionRequest,
        result: Actions | RlmeshError,
        run: BatchRun,
    ) -> None:
        if self._is_released:
            return
        self._predicting.discard(prediction)
        response: SessionResponse
        try:
            if isinstance(result, RlmeshError):
                prediction.route.lanes.note_failed(prediction.slots)
                response = self._failed(request, result)
            else:
                self.num_predicted += 1
                action, *later = (result,) if isinstance(result, bytes) else result
                response = Predicted(
                    request.request_id,
                    request.context,
                    action,
                    run,
                    prediction.queue_ns,
                    request.mirror,
                    tuple(later),
                )
            self._follow(self._session.complete(request, response))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    async def _work(self, request: RouteRequest) -> None:
        try:
            try:
                response = await self._answer(request)
            except RlmeshError as error:
                response = self._failed(request, error)
            self._follow(self._session.complete(request, response))
        except Exception:  # noqa: BLE001  # all other sessions go on
            self._fail()

    def _failed(self, request: RouteRequest, error: RlmeshError) -> ModelFailed:
        with logged_as(*self._names):
            return failure_response(request.request_id, error)

    async def _answer(self, request: RouteRequest) -> SessionResponse:
        route_id = request.context.route_id
        if isinstance(request, ConfigureRoute):
            num_routes = self._session.num_routes
            await self._routes.configure(route_id, request.contract, request.horizon, num_routes)
            return RouteConfigured(request.request_id, self._batcher.horizon)
        if isinstance(request, ForgetEpisodes):
            await self._routes.forget(route_id, request.episode_ids)
            return EpisodesForgotten(request.request_id)
        self._routes.close(route_id)
        return RouteClosed(request.request_id)
