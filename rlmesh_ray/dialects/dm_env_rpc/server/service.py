"""The shell of dm_env_rpc's Environment: bytes in, conversation, bytes out."""

import logging
from collections.abc import AsyncIterator

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, ErrorResponse
from rlmesh_ray.dialects.dm_env_rpc.server.process_stream import ProcessStream
from rlmesh_ray.dialects.dm_env_rpc.server.properties import Properties
from rlmesh_ray.dialects.dm_env_rpc.server.world_registry import WorldRegistry
from rlmesh_ray.dialects.dm_env_rpc.wire.responses import pack_error
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.handshake_service import PrependedStream, first_message
from rlmesh_ray.server.idle_timeout import IdleTimeout
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract

_LOG = logging.getLogger(__name__)

SERVICE = "dm_env_rpc.v1.Environment"
_STOPPING = "the endpoint is stopping"


class EnvironmentService:
    """Answers the one call of Environment.

    Args:
        pool: Started; where worlds get their workers.
        contract: What the endpoint promises.
        step_grace_s: See ``EnvServer``.
        drain: The endpoint's.
        idle_timeout_s: See ``EnvServer``.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        step_grace_s: float,
        drain: Drain,
        idle_timeout_s: float | None = None,
    ) -> None:
        self._worlds = WorldRegistry(pool, contract, step_grace_s)
        self._properties = Properties(contract)
        self._drain = drain
        self._idle_timeout_s = idle_timeout_s

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        process = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Serve one stream: one response for each request, in order."""
        await context.send_initial_metadata(())
        first = await first_message(requests, context)
        if first is None:
            return
        idle_timeout = IdleTimeout(self._idle_timeout_s)
        conversation = ProcessStream(self._worlds, self._properties)
        try:
            async for data in idle_timeout.watch(PrependedStream(first, requests)):
                self._drain.begin_request()
                try:
                    await context.write(await _answer(conversation, data))
                finally:
                    self._drain.end_request()
                if self._drain.is_draining:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            conversation.end()


async def _answer(conversation: ProcessStream, data: bytes) -> bytes:
    try:
        return await conversation.answer(data)
    except Exception as error:  # noqa: BLE001  # outermost frame: the stream goes on
        _LOG.exception("a dm_env_rpc request has failed")
        return pack_error(ErrorResponse(Code.INTERNAL, f"the endpoint failed: {error!r}"))
