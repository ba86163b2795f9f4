"""The shell of EnvService: bytes in, session, host, bytes out.

Handlers take raw bytes, so that a malformed frame is answered in band instead of breaking
the stream.
"""

import logging
import time
import uuid
from collections.abc import AsyncIterator

import grpc

from rlmesh_ray import __version__
from rlmesh_ray.errors import CapacityError, CodecError, EnvStartError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.env_session import EnvSession, State
from rlmesh_ray.protocol.handshake import answer_offer
from rlmesh_ray.protocol.messages import EnvResponse
from rlmesh_ray.server.env_host import EnvHost
from rlmesh_ray.server.offers import Offers
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import env as wire

_LOG = logging.getLogger(__name__)

SERVICE = "rlmesh.env.v1.EnvService"


class EnvService:
    """Answers the three calls of EnvService.

    Args:
        pool: Started; where sessions get their workers.
        contract: What the endpoint promises.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract) -> None:
        self._pool = pool
        self._contract = contract
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
        """Negotiate the edition; tell the contract when compatible."""
        try:
            offer = wire.parse_offer(data)
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        answer = answer_offer(
            offer,
            server_version=__version__,
            capabilities={
                capabilities.ENV_SERVICE: "",
                capabilities.SPACES_CORE: "",
                capabilities.NDARRAY: "",
                capabilities.PARTIAL_RESET: "",
                capabilities.SESSION: self._offers.remember(offer),
            },
            contract=self._contract,
        )
        return wire.pack_answer(answer)

    async def join(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        """Serve one session: one response for each request, in arrival order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        tag_arrays = self._knows_arrays(context)
        try:
            worker = await self._pool.acquire()
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        except EnvStartError as error:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
        host = EnvHost(self._pool, worker, self._contract)
        session = EnvSession(self._contract.num_envs, _new_episode_id)
        try:
            async for data in requests:
                response = await _answer(session, host, data)
                if session.state is State.CLOSED:
                    # Before the answer: whoever reads it may open the next session at once.
                    host.release()
                yield wire.pack_response(response, tag_arrays=tag_arrays)
                if session.state is State.CLOSED:
                    break
        finally:
            session.interrupt(time.time_ns())
            host.release()

    async def shutdown(self, data: bytes, _context: grpc.aio.ServicerContext) -> bytes:
        """Refuse: an endpoint is ended by whoever started it."""
        _LOG.info("remote Shutdown refused")
        return wire.pack_shutdown_response(
            accepted=False, message="remote shutdown is disabled on this endpoint"
        )

    def _knows_arrays(self, context: grpc.aio.ServicerContext) -> bool:
        metadata = dict(context.invocation_metadata() or ())
        session_id = str(metadata.get(capabilities.SESSION_METADATA_KEY, ""))
        return capabilities.NDARRAY in self._offers.claim(session_id)


async def _answer(session: EnvSession, host: EnvHost, data: bytes) -> EnvResponse:
    request = wire.parse_request(data)
    refusal = session.receive(request, time.time_ns())
    if refusal is not None:
        return refusal
    outcome = await host.run(request)  # type: ignore[arg-type]  # the session refuses Unreadable
    return session.complete(outcome, time.time_ns())


def _new_episode_id() -> str:
    return uuid.uuid4().hex
