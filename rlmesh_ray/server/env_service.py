"""gRPC handlers of EnvService: each Join stream is a session, in the dialect of its first message.

Handlers take raw bytes, so that a malformed frame is answered in band instead of breaking
the stream.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_dialects import EnvServerDialect, load_env_dialects
from rlmesh_ray.server.env_executor import EnvExecutor
from rlmesh_ray.server.env_session_handler import EnvSessionFactory, EnvSessionHandler
from rlmesh_ray.server.handshake_service import HandshakeService, PrependedStream, ServiceOptions
from rlmesh_ray.server.idle_timeout import IdleTimeout, change_detector
from rlmesh_ray.server.lane_call_service import LaneCallService, session_id_of
from rlmesh_ray.server.observer_service import ObserverService
from rlmesh_ray.server.session_limit import refusing_when_full
from rlmesh_ray.server.session_log import SessionLog
from rlmesh_ray.server.session_scheduler import SessionScheduler
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.transport.connection_broker import ConnectionBroker
from rlmesh_ray.wire import image_codec_v1
from rlmesh_ray.wire.image_codec_v1 import SentImages

SERVICE = "rlmesh.env.v1.EnvService"
_ABLE = {
    capabilities.ENV_SERVICE: "",
    capabilities.SPACES_CORE: "",
    capabilities.NDARRAY: "",
    capabilities.NUMBERED_REQUESTS: "",
    capabilities.PARTIAL_RESET: "",
}
_STOPPING = "the endpoint is stopping"
_SAME_STEP_REFUSAL = (
    "this environment resets its lanes within the step that ends an episode (autoreset mode "
    "SAME_STEP), which edition 2026.06 reserves and this client does not know: serve it with "
    f"NEXT_STEP or DISABLED, or use a client that offers the capability {capabilities.SAME_STEP}"
)


@dataclass(frozen=True, slots=True)
class SessionServices:
    """Services for open sessions besides their streams."""

    observers: ObserverService
    """Shows sessions to observers."""
    calls: LaneCallService
    """Calls methods of the environment in a session's lanes."""
    broker: ConnectionBroker
    """Opens direct connections for sessions."""


class EnvService:
    """Answers the three calls of EnvService.

    Args:
        pool: Started; starts the workers of sessions.
        contract: The endpoint's.
        step_grace_s: As for ``EnvServer``.
        options: What the operator has set for clients.
        drain: Counts the requests of the endpoint.
        services: For the clients of its sessions.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        step_grace_s: float,
        options: ServiceOptions,
        drain: Drain,
        services: SessionServices,
    ) -> None:
        self._pool = pool
        self._contract = contract
        self._idle_timeout_s = options.idle_timeout_s
        self._session_factory = EnvSessionFactory(pool, contract, step_grace_s)
        self._drain = drain
        self._calls, self._broker, self._observers = (
            services.calls,
            services.broker,
            services.observers,
        )
        # The edition reserves this mode: a client without the capability would take the first
        # observation of the next episode for the last one of this, and learn from it.
        self._is_same_step = contract.autoreset_mode is AutoresetMode.SAME_STEP
        own = {capabilities.SAME_STEP: ""} if self._is_same_step else {}
        images = image_codec_v1.offer(contract.observation_space, resizes=not self._is_same_step)
        edition = {**own, **images, **services.calls.able, **services.broker.offered_capabilities}
        self._dialects = load_env_dialects()
        others = self._dialects.keys() - {PROTOCOL_V1}
        able: dict[str, Mapping[str, str]] = {PROTOCOL_V1: {**_ABLE, **edition}}
        for name in others:
            steps_subsets = self._session_factory.steps_subsets
            able[name] = self._dialects[name].subset_capabilities if steps_subsets else {}
        obstacles = dict.fromkeys(others if self._is_same_step else (), _SAME_STEP_REFUSAL)
        self._handshakes = HandshakeService(self._dialects, able, options, contract, obstacles)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of the service."""
        return self._handshakes.handlers(SERVICE, self.join)

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: one response for each request, in arrival order."""
        async with refusing_when_full(context):
            await self._serve(requests, context)

    async def _serve(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        offered = self._handshakes.capabilities_of(context)
        if self._is_same_step and capabilities.SAME_STEP not in offered:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _SAME_STEP_REFUSAL)
        begun = await self._begin(requests, context)
        if begun is None:
            return
        dialect, frames, images = begun
        is_numbered = capabilities.NUMBERED_REQUESTS in offered
        handler = self._session_factory.open(
            dialect,
            tag_arrays=capabilities.NDARRAY in offered,
            is_numbered=is_numbered,
            images=images,
        )
        lanes = self._calls.open(context, handler.executor)
        idle_timeout = IdleTimeout(self._idle_timeout_s, _signs_of_life(handler.executor, lanes))
        cleanup = ExitStack()
        cleanup.callback(self._calls.close, context, lanes)
        cleanup.callback(self._observers.open(context.peer(), dialect.name, handler, lanes))
        if is_numbered and offered & {capabilities.SHARED_MEMORY, capabilities.DIRECT_TCP}:
            cleanup.callback(self._wait_at_broker(session_id_of(context), handler, lanes))
        log = SessionLog(
            self._pool.counts.sessions,
            context.peer(),
            dialect.name,
            lambda: {"steps": handler.executor.num_steps},
        )
        try:
            async for data in idle_timeout.watch(frames):
                self._drain.begin_request()
                try:
                    answer = await lanes.run_request(
                        handler.accept(data), partial(handler.timeout_s, data)
                    )
                    if handler.is_over:
                        cleanup.close()
                        # Before the answer: its reader may open the next session at once.
                        handler.executor.release()
                    await context.write(answer)
                finally:
                    self._drain.end_request()
                if handler.is_over:
                    break
                if self._drain.is_draining:
                    # Not an orderly end: there may be requests that were never taken.
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            handler.interrupt()
            cleanup.close()
            handler.executor.release()
            log.end(
                is_closed=handler.is_over,
                is_idle=idle_timeout.has_expired,
                is_stopping=self._drain.is_draining,
            )

    async def _images(self, context: grpc.aio.ServicerContext) -> SentImages | None:
        """Return how the client of a Join wants images, or abort a call that cannot have it so."""
        metadata = dict(context.invocation_metadata() or ())
        try:
            return image_codec_v1.images_asked_for(metadata, self._contract)
        except ConfigurationError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise AssertionError("abort raises") from error

    async def _begin(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> tuple[EnvServerDialect, AsyncIterator[bytes], SentImages | None] | None:
        """Reserve a session; return its dialect, all messages of the stream, and its images.

        None: the stream has ended without a message, and nothing is reserved.
        """
        # Only the edition's handshake gives session ids. A client with one may call into the lanes,
        # or open a direct connection, before its first message.
        is_known = bool(session_id_of(context))
        if is_known:
            await self._handshakes.require_enabled(PROTOCOL_V1, context)
        images = await self._images(context) if is_known else None
        await self._pool.reserve()
        begun = None
        try:
            # Some clients wait for the headers before they send anything; and if their call ends
            # just after these, they may not see why (rlmesh 0.1.0, both).
            await context.send_initial_metadata(())
            if is_known:
                begun = self._dialects[PROTOCOL_V1], requests, images
            elif message := await self._handshakes.first_message(requests, context):
                stream = PrependedStream(message.frame, requests)
                begun = self._dialects[message.generation], stream, None
        finally:
            if begun is None:
                self._pool.release(None, is_idle=True)
        return begun

    def _wait_at_broker(
        self, session_id: str, handler: EnvSessionHandler, lanes: SessionScheduler
    ) -> Callable[[], None]:
        """Let the client open direct connections, until the returned function is called."""
        return self._broker.open(
            session_id,
            lambda *wanted: lanes.run_between_requests(partial(handler.open_direct, *wanted)),
            lambda: lanes.run_between_requests(handler.executor.close_direct),
        )


def _signs_of_life(executor: EnvExecutor, lanes: SessionScheduler) -> Callable[[], bool]:
    """Return a function that returns whether the client has been active besides its stream."""

    def is_at_work() -> bool:
        return executor.is_direct_step_running or lanes.is_called

    # Steps and calls that have ended since the last look count, too.
    has_moved = change_detector(lambda: (executor.num_direct_steps, lanes.num_calls, is_at_work()))
    return lambda: has_moved() or is_at_work()
