"""The gRPC services of an environment endpoint.

EnvService: each Join stream is a session, in the dialect of its first message. LaneService: calls
into the lanes of an open session. TransportService: tickets for direct TCP connections.
ObserverService: lists of the sessions, which ask no worker, and pictures of their lanes.

Handlers take raw bytes, so that a malformed frame is answered in band instead of breaking the
stream.
"""

import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Protocol

from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import CodecError, ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.env_session import Failure
from rlmesh_ray.server.endpoint.calls import IdleTimeout, PrependedStream, parsed, refuse
from rlmesh_ray.server.endpoint.gate import Drain, refusing_when_full
from rlmesh_ray.server.endpoint.handshake_service import (
    HandshakeService,
    ServiceOptions,
    came_through_gateway,
    capabilities_of_session,
)
from rlmesh_ray.server.env.connection_broker import ConnectionBroker
from rlmesh_ray.server.env.lane_session import (
    EDITION_DIALECT,
    CallOutcome,
    EnvServerDialect,
    LaneSession,
    Sessions,
)
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.server.observe.counters import SessionLog
from rlmesh_ray.server.observe.observer_service import MAX_A_SECOND, TokenBucket
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.wire import image_codec_v1, lane_calls_v1, observe_v1, transport_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages

SERVICE = "rlmesh.env.v1.EnvService"
_ABLE = {
    capabilities.ENV_SERVICE: "",
    capabilities.SPACES_CORE: "",
    capabilities.NDARRAY: "",
    capabilities.NUMBERED_REQUESTS: "",
    capabilities.PARTIAL_RESET: "",
}
_GONE = "no such session is open (any more); list them again"
_STOPPING = "the endpoint is stopping"
_SAME_STEP_REFUSAL = (
    "this environment resets its lanes within the step that ends an episode (autoreset mode "
    "SAME_STEP), which edition 2026.06 reserves and this client does not know: serve it with "
    f"NEXT_STEP or DISABLED, or use a client that offers the capability {capabilities.SAME_STEP}"
)


class DialectService(Protocol):
    """A gRPC service that a dialect adds to the endpoint of an environment."""

    @property
    def max_request_bytes(self) -> int:
        """Size of the largest request that a client can have a use for."""

    @property
    def streams_per_session(self) -> int:
        """How many streams a session may have."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of the service."""


MakeDialectService = Callable[[WorkerPool, EnvContract, Drain, float | None], DialectService]
"""Takes three arguments of ``EnvService``, and the idle timeout of a session in seconds."""


def load_dialect_services(enabled: Collection[str]) -> list[MakeDialectService]:
    return [
        each.load("server.service").ENV_SERVICE
        for each in registry.DIALECTS
        if each.service and each.name in enabled
    ]


def load_env_dialects() -> dict[str, EnvServerDialect]:
    return {PROTOCOL_V1: EDITION_DIALECT, **registry.load_generations("server.env_dialect")}


class EnvService:
    """Answers the calls of an environment endpoint, about its sessions. For the serving loop.

    Args:
        pool: Started; starts the workers of sessions.
        contract: The endpoint's.
        options: What the operator has set for clients.
        drain: Counts the requests of the endpoint.
        broker: Opens direct connections, for the sessions that it knows.
        allowed_calls: From ``checked_names``; if empty, there is no LaneService.
        clock: Returns seconds that only grow; for the limit of lists.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        options: ServiceOptions,
        drain: Drain,
        broker: ConnectionBroker,
        allowed_calls: tuple[str, ...] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._contract = pool, contract
        self._idle_timeout_s = options.idle_timeout_s
        self._drain = drain
        self._broker = broker
        self._allowed_calls = allowed_calls
        self._lists = TokenBucket(MAX_A_SECOND, clock)
        self.sessions: Sessions = broker.sessions
        # The edition reserves this mode: a client without the capability would take the first
        # observation of the next episode for the last one of this, and learn from it.
        self._is_same_step = contract.autoreset_mode is AutoresetMode.SAME_STEP
        own = {capabilities.SAME_STEP: ""} if self._is_same_step else {}
        images = image_codec_v1.offer(contract.observation_space, resizes=not self._is_same_step)
        calls = {capabilities.LANE_CALLS: ",".join(allowed_calls)} if allowed_calls else {}
        self._dialects = load_env_dialects()
        others = self._dialects.keys() - {PROTOCOL_V1}
        able: dict[str, Mapping[str, str]] = {
            PROTOCOL_V1: {**_ABLE, **own, **images, **calls, **broker.offered_capabilities}
        }
        for name in others:
            able[name] = self._dialects[name].subset_capabilities if pool.steps_subsets else {}
        obstacles = dict.fromkeys(others if self._is_same_step else (), _SAME_STEP_REFUSAL)
        self._handshakes = HandshakeService(self._dialects, able, options, contract, obstacles)

    def handlers(self, *, has_observers: bool) -> list[grpc.GenericRpcHandler]:
        offered: dict[str, dict[str, Callable[..., object]]] = {}
        if self._allowed_calls:
            offered[lane_calls_v1.SERVICE] = {"Call": self.call}
        if capabilities.DIRECT_TCP in self._broker.offered_capabilities:
            offered[transport_v1.SERVICE] = {"OpenTcp": self.open_tcp}
        if has_observers:
            offered[observe_v1.SERVICE] = {"List": self.list, "Render": self.render}
        return [
            self._handshakes.handlers(SERVICE, self.join),
            *(
                grpc.method_handlers_generic_handler(
                    service,
                    {name: grpc.unary_unary_rpc_method_handler(each) for name, each in own.items()},
                )
                for service, own in offered.items()
            ),
        ]

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async with refusing_when_full(context):
            await self._serve(requests, context)

    async def _serve(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        session_id = session_id_of(context)
        offered = capabilities_of_session(session_id)
        if self._is_same_step and capabilities.SAME_STEP not in offered:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _SAME_STEP_REFUSAL)
        begun = await self._begin(requests, context)
        if begun is None:
            return
        dialect, frames, images = begun
        session = LaneSession(
            self._pool,
            self._contract,
            dialect,
            offered,
            images=images,
            allowed_calls=self._allowed_calls,
            session_id=session_id,
            peer=context.peer(),
        )
        self.sessions.add(session)
        idle_timeout = IdleTimeout(self._idle_timeout_s, session.was_active)
        log = SessionLog(
            self._pool.counts.sessions,
            session.peer,
            dialect.name,
            lambda: {"steps": session.worker.counts.read().num_steps},
        )
        try:
            async for data in idle_timeout.watch(frames):
                self._drain.begin_request()
                try:
                    answer = await session.answer(data)
                    if session.is_over:
                        # Before the answer: its reader may open the next session immediately.
                        self.sessions.end(session)
                    await context.write(answer)
                finally:
                    self._drain.end_request()
                if session.is_over:
                    break
                if self._drain.is_draining:
                    # Not an orderly end: there may be requests that were never taken.
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            self.sessions.end(session)
            log.end(
                is_closed=session.is_over,
                is_idle=idle_timeout.has_expired,
                is_stopping=self._drain.is_draining,
            )

    async def _begin(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> tuple[EnvServerDialect, AsyncIterator[bytes], SentImages | None] | None:
        """Reserve a session; return its dialect, all messages of the stream, and its images.

        None: the stream has ended without a message, and nothing is reserved.
        """
        # Only the edition's handshake gives session ids. A client with one may call into the lanes,
        # or open a direct connection, before its first message.
        is_known = bool(session_id_of(context))
        images = None
        if is_known:
            await self._handshakes.require_enabled(PROTOCOL_V1, context)
            metadata = dict(context.invocation_metadata() or ())
            try:
                images = image_codec_v1.images_asked_for(metadata, self._contract)
            except ConfigurationError as error:
                await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        await self._pool.reserve()
        begun = None
        try:
            # Some clients wait for the headers before they send anything; and if their call ends
            # just after these, they may not see why (rlmesh 0.1.0, both).
            await context.send_initial_metadata(())
            if is_known:
                begun = self._dialects[PROTOCOL_V1], requests, images
            elif message := await self._handshakes.first_message(requests, context):
                generation, frame = message
                begun = self._dialects[generation], PrependedStream(frame, requests), None
        finally:
            if begun is None:
                self._pool.release(None, is_idle=True)
        return begun

    # --- calls into lanes, and direct connections --------------------------------------------

    async def call(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        call = parsed(lane_calls_v1.parse_call, data)
        del data
        if isinstance(call, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(call))
        session = self.sessions.by_id.get(session_id_of(context))
        outcome: CallOutcome = None
        if session is not None:
            with self._drain.request_in_progress():
                async with refusing_when_full(context):
                    outcome = await session.call(call)
        if outcome is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "no such session is open")
        return lane_calls_v1.pack_response(outcome)

    async def open_tcp(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        timeout_ms = parsed(transport_v1.parse_request, data)
        if isinstance(timeout_ms, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(timeout_ms))
        if came_through_gateway(context):
            message = "a gateway, which takes no direct connections, stands before this endpoint"
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        session = self.sessions.by_id.get(session_id_of(context))
        if session is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, "no such session is open")
        ticket = self._broker.tickets.issue(session.session_id, timeout_ms)
        return transport_v1.pack_response(ticket.ticket_id, ticket.key, ticket.endpoint)

    # --- observers ----------------------------------------------------------------------------

    async def list(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        del data  # the request is empty
        if not self._lists.take():
            message = f"{MAX_A_SECOND} lists of sessions a second are allowed here; ask less often"
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        return observe_v1.pack_sessions(
            each.report(name) for name, each in self.sessions.by_name.items()
        )

    async def render(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        request = parsed(observe_v1.parse_render_request, data)
        del data
        if isinstance(request, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(request))
        name, lane = request
        session, contract = self.sessions.by_name.get(name), self._contract
        if session is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, _GONE)
        if lane >= contract.num_envs:
            message = f"lane {lane} is not in [0, {contract.num_envs})"
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, message)
        if contract.render_mode != "rgb_array":
            await refuse(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the environment has render mode {contract.render_mode or 'none'}, which gives no "
                "pictures; serve it with render_mode='rgb_array' "
                '(--env-kwargs \'{"render_mode": "rgb_array"}\')',
            )
        if objection := session.pictures.objection(is_rendering=bool(session.observations)):
            await refuse(context, grpc.StatusCode.RESOURCE_EXHAUSTED, objection)
        outcome = await session.observe(lane)
        if outcome is None:
            await refuse(context, grpc.StatusCode.NOT_FOUND, _GONE)
        if isinstance(outcome, Failure):
            message = f"the session has no picture to give: {outcome.message}"
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        session.pictures.note(outcome.took_s)
        if outcome.png is None:
            message = (
                f"the environment has rendered nothing of lane {lane}; ask again when the lane has "
                "been reset"
            )
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, message)
        return observe_v1.pack_png(outcome.png)


def session_id_of(context: grpc.aio.ServicerContext) -> str:
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(capabilities.SESSION_METADATA_KEY, ""))
