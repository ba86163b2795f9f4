"""The shell of dm_env_rpc's Environment: bytes in, conversation, bytes out."""

import logging
from collections.abc import AsyncIterator

from rlmesh_ray.protocol.world_messages import Code, Refusal
from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.dm_env_rpc.conversation import Conversation
from rlmesh_ray.server.dm_env_rpc.properties import Properties
from rlmesh_ray.server.dm_env_rpc.worlds import Worlds
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.first_words import Resumed, first_words
from rlmesh_ray.server.silence import Silence
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.dm_env_rpc_v1.responses import pack_refusal

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
        self._worlds = Worlds(pool, contract, step_grace_s)
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
        first = await first_words(requests, context)
        if first is None:
            return
        silence = Silence(self._idle_timeout_s)
        conversation = Conversation(self._worlds, self._properties)
        try:
            async for data in silence.heard(Resumed(first, requests)):
                self._drain.owe()
                try:
                    await context.write(await _answer(conversation, data))
                finally:
                    self._drain.settle()
                if self._drain.is_wanted:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await silence.tell(context)
        finally:
            silence.stop()
            conversation.end()


async def _answer(conversation: Conversation, data: bytes) -> bytes:
    try:
        return await conversation.answer(data)
    except Exception as error:  # noqa: BLE001  # outermost frame: the stream goes on
        _LOG.exception("a dm_env_rpc request has failed")
        return pack_refusal(Refusal(Code.INTERNAL, f"the endpoint failed: {error!r}"))
