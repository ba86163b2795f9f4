"""gRPC service of dm_env_rpc, ``dm_env_rpc.v1.Environment``, on the endpoint of an environment."""

import logging
import math
from collections.abc import AsyncIterator

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, ErrorResponse
from rlmesh_ray.dialects.dm_env_rpc.server.process_stream import ProcessStream
from rlmesh_ray.dialects.dm_env_rpc.server.properties import Properties
from rlmesh_ray.dialects.dm_env_rpc.server.world_membership import WorldRegistry
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import agent_names
from rlmesh_ray.dialects.dm_env_rpc.wire.responses import pack_error
from rlmesh_ray.dialects.dm_env_rpc.wire.settings import MAX_SETTINGS_BYTES
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_dialects import DialectService
from rlmesh_ray.server.handshake_service import PrependedStream, first_message
from rlmesh_ray.server.idle_timeout import IdleTimeout
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.leaves import leaves
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

SERVICE = "dm_env_rpc.v1.Environment"
_STOPPING = "the endpoint is stopping"
_LONGEST_INTEGER_BYTES = 10


class EnvironmentService:
    """Answers the service's one call, Process; its arguments are those of ``DialectService``."""

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        step_grace_s: float,
        drain: Drain,
        idle_timeout_s: float | None = None,
    ) -> None:
        self._contract = contract
        self._worlds = WorldRegistry(pool, contract, step_grace_s)
        self._properties = Properties(contract)
        self._drain = drain
        self._idle_timeout_s = idle_timeout_s

    @property
    def max_request_bytes(self) -> int:
        """Size of the largest request that a client can have a use for, 10 bytes an integer."""
        contract = self._contract
        num_elements = sum(
            math.prod(leaf.shape)
            for leaf in leaves(contract.action_space)
            if leaf.dtype is not None
        )
        wanted = contract.num_envs * num_elements * _LONGEST_INTEGER_BYTES + MAX_SETTINGS_BYTES
        return min(wanted, MAX_MESSAGE_BYTES)

    @property
    def streams_per_session(self) -> int:
        """How many agents a world may have: each has a stream of its own."""
        return self._contract.num_envs * max(1, len(agent_names(self._contract)))

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of the service."""
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
        stream = ProcessStream(self._worlds, self._properties)
        try:
            async for data in idle_timeout.watch(PrependedStream(first, requests)):
                self._drain.begin_request()
                try:
                    await context.write(await _answer(stream, data))
                finally:
                    self._drain.end_request()
                if self._drain.is_draining:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            stream.end()


async def _answer(stream: ProcessStream, data: bytes) -> bytes:
    try:
        return await stream.answer(data)
    except Exception as error:  # noqa: BLE001  # outermost frame: the stream goes on
        _LOG.exception("a dm_env_rpc request has failed")
        return pack_error(ErrorResponse(Code.INTERNAL, f"the endpoint failed: {error!r}"))


ENV_SERVICE: type[DialectService] = EnvironmentService
