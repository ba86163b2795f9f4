"""The shell of EnvService: each stream that comes gets an exchange, in the language it begins with.

Handlers take raw bytes, so that a malformed frame is answered in band instead of breaking
the stream.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from rlmesh_ray.errors import CapacityError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.generations import PROTOCOL_V1, WIRE_V1
from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_calls import EnvCalls, OpenSession, session_id_of
from rlmesh_ray.server.env_dialects import ENV_DIALECTS, EnvDialect
from rlmesh_ray.server.env_exchange import EnvExchange, Exchanges
from rlmesh_ray.server.env_host import EnvHost
from rlmesh_ray.server.first_words import Resumed
from rlmesh_ray.server.observer_service import ObserverService
from rlmesh_ray.server.reception import HouseRules, Reception
from rlmesh_ray.server.session_log import SessionLog
from rlmesh_ray.server.silence import Silence, changes
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.transport.broker import Broker
from rlmesh_ray.wire.rlmesh_v1 import env as edition_frames
from rlmesh_ray.wire.rlmesh_wire_v1 import env as released_frames

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
class SideDoors:
    """What open sessions have besides their streams."""

    observers: ObserverService
    """Where others than their clients see what they do."""
    calls: EnvCalls
    """Where they reach into their lanes."""
    broker: Broker
    """Where they get direct roads."""


class EnvService:
    """Answers the three calls of EnvService.

    Args:
        pool: Started; where sessions get their workers.
        contract: What the endpoint promises.
        step_grace_s: See ``EnvServer``.
        rules: What clients may do.
        drain: The endpoint's.
        doors: Open to the clients of its sessions.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        step_grace_s: float,
        rules: HouseRules,
        drain: Drain,
        doors: SideDoors,
    ) -> None:
        self._pool = pool
        self._idle_timeout_s = rules.idle_timeout_s
        self._exchanges = Exchanges(pool, contract, step_grace_s)
        self._drain = drain
        self._calls, self._broker, self._observers = doors.calls, doors.broker, doors.observers
        # The edition reserves this mode: a client that does not know it would take the first
        # observation of the next episode for the last one of this, and learn from it.
        self._is_same_step = contract.autoreset_mode is AutoresetMode.SAME_STEP
        own = {capabilities.SAME_STEP: ""} if self._is_same_step else {}
        subsets = (
            {capabilities.SUBSET_STEP: capabilities.YES} if self._exchanges.steps_subsets else {}
        )
        self._reception = Reception(
            {PROTOCOL_V1: edition_frames, WIRE_V1: released_frames},
            {
                PROTOCOL_V1: {**_ABLE, **own, **doors.calls.able, **doors.broker.able},
                WIRE_V1: subsets,
            },
            rules,
            contract,
            {WIRE_V1: _SAME_STEP_REFUSAL} if self._is_same_step else {},
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        return self._reception.handlers(SERVICE, self.join)

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: one response for each request, in arrival order."""
        offered = self._reception.capabilities_of(context)
        if self._is_same_step and capabilities.SAME_STEP not in offered:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _SAME_STEP_REFUSAL)
        begun = await self._begin(requests, context)
        if begun is None:
            return
        dialect, frames = begun
        is_numbered = capabilities.NUMBERED_REQUESTS in offered
        exchange = self._exchanges.open(
            dialect, tag_arrays=capabilities.NDARRAY in offered, is_numbered=is_numbered
        )
        lanes = self._calls.open(context, exchange.host)
        silence = Silence(self._idle_timeout_s, _signs_of_life(exchange.host, lanes))
        doors = ExitStack()
        doors.callback(self._calls.close, context, lanes)
        doors.callback(self._observers.open(context.peer(), dialect.name, exchange, lanes))
        if is_numbered and offered & {capabilities.SHARED_MEMORY, capabilities.DIRECT_TCP}:
            doors.callback(self._wait_at_broker(session_id_of(context), exchange, lanes))
        log = SessionLog(
            self._pool.counts.sessions,
            context.peer(),
            dialect.name,
            lambda: {"steps": exchange.host.num_steps},
        )
        try:
            async for data in exchange.requests(silence.heard(frames)):
                self._drain.owe()
                try:
                    answer = await lanes.in_turn(
                        partial(exchange.answer, data), partial(exchange.timeout_s, data)
                    )
                    if exchange.is_over:
                        doors.close()
                        # Before the answer: whoever reads it may open the next session at once.
                        exchange.host.release()
                    await context.write(answer)
                finally:
                    self._drain.settle()
                if exchange.is_over:
                    break
                if self._drain.is_wanted:
                    # Not an orderly end: there may be requests that were never taken.
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await silence.tell(context)
        finally:
            silence.stop()
            exchange.interrupt()
            doors.close()
            exchange.host.release()
            log.end(
                is_closed=exchange.is_over,
                is_silent=silence.is_over,
                is_stopping=self._drain.is_wanted,
            )

    async def _begin(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> tuple[EnvDialect, AsyncIterator[bytes]] | None:
        """Take a place; return what the client speaks, and all its messages.

        None: it has left without a word, and the place is free again.
        """
        # Only the edition's handshake gives session ids. Who has one may call into the lanes, or
        # come for a road, before anything is said here.
        is_known = bool(session_id_of(context))
        if is_known:
            await self._reception.require_spoken(PROTOCOL_V1, context)
        await self._reserve(context)
        begun = None
        try:
            # Some clients wait for the headers before they send anything; and if their call ends
            # just after these, they may not see why (rlmesh 0.1.0, both).
            await context.send_initial_metadata(())
            if is_known:
                begun = ENV_DIALECTS[PROTOCOL_V1], requests
            elif words := await self._reception.first_words(requests, context):
                begun = ENV_DIALECTS[words.generation], Resumed(words.frame, requests)
        finally:
            if begun is None:
                self._pool.release(None, is_idle=True)
        return begun

    async def _reserve(self, context: grpc.aio.ServicerContext) -> None:
        try:
            await self._pool.reserve()
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)

    def _wait_at_broker(
        self, session_id: str, exchange: EnvExchange, lanes: OpenSession
    ) -> Callable[[], None]:
        """Let the client come for a road, until what is returned is called."""
        return self._broker.open(
            session_id,
            lambda *wanted: lanes.between(partial(exchange.lend_road, *wanted)),
            lambda: lanes.between(exchange.host.end_road),
        )


def _signs_of_life(host: EnvHost, lanes: OpenSession) -> Callable[[], bool]:
    """Return what tells whether a client has done something since, beside its stream."""

    def is_at_work() -> bool:
        return host.is_road_busy or lanes.is_called

    # What has ended since the last look counts, too.
    has_moved = changes(lambda: (host.num_direct_steps, lanes.num_calls, is_at_work()))
    return lambda: has_moved() or is_at_work()
