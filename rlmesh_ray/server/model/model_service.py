"""The gRPC service of a policy (ModelService): each Join stream gets a ``ModelStream``."""

import asyncio
from collections.abc import AsyncIterator

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import ACTION_CHUNKS, POLICY, PROTOCOL_V1
from rlmesh_ray.server.endpoint.calls import IdleTimeout
from rlmesh_ray.server.endpoint.gate import Drain, refusing_when_full, require_descriptors
from rlmesh_ray.server.endpoint.handshake_service import HandshakeService, ServiceOptions
from rlmesh_ray.server.model.batcher import Batcher
from rlmesh_ray.server.model.model_stream import BusyPolledFrames, ModelStream, load_model_dialects
from rlmesh_ray.server.observe.counters import SessionLog
from rlmesh_ray.wire import image_codec_v1, policy_v1

SERVICE = "rlmesh.model.v1.ModelService"
_FAULT = "a fault of the server, which its log has, ended this session; open another one"


class ModelService:
    """Answers the three calls of ModelService.

    Args:
        batcher: Runs the policy.
        options: The operator's options.
        drain: Counts the pending requests.
    """

    def __init__(self, batcher: Batcher, options: ServiceOptions, drain: Drain) -> None:
        self._batcher = batcher
        self._on_close = options.on_close
        self._idle_timeout_s = options.idle_timeout_s
        self._drain = drain
        self._dialects = load_model_dialects()
        able = {name: each.capabilities for name, each in self._dialects.items()}
        able[PROTOCOL_V1] = {**able[PROTOCOL_V1], **image_codec_v1.offer(batcher.observation_space)}
        self._handshakes = HandshakeService(
            self._dialects,
            able,
            options,
            on_request={
                POLICY: lambda: policy_v1.pack(batcher.facts()),
                **({ACTION_CHUNKS: lambda: str(batcher.horizon)} if batcher.horizon > 1 else {}),
            },
        )

    def handlers(self) -> grpc.GenericRpcHandler:
        return self._handshakes.handlers(SERVICE, self.join)

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: each request answered once, each route's in order."""
        async with refusing_when_full(context):
            require_descriptors(0)
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        opening = await self._handshakes.first_message(requests, context)
        if opening is None:
            return
        generation, first = opening
        stream = ModelStream(self._batcher, self._drain, self._dialects[generation]())
        idle_timeout = IdleTimeout(self._idle_timeout_s, lambda: stream.num_pending > 0)
        counts = self._batcher.sessions
        counts.note_opened()
        log = SessionLog(
            counts,
            context.peer(),
            generation,
            lambda: {"predictions": stream.num_predicted},
        )
        requests = BusyPolledFrames(idle_timeout.watch(requests), counts)
        reader = asyncio.ensure_future(stream.read(first, requests))
        # The message may be large, and the session lasts.
        del opening, first
        try:
            await stream.write(context)
            if stream.has_failed:
                await context.abort(grpc.StatusCode.INTERNAL, _FAULT)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            reader.cancel()
            # Also when the client left right after its answer.
            if stream.is_closed and self._on_close is not None:
                self._on_close()
            # The stream's own cancellation must not cut the release short.
            releasing = asyncio.ensure_future(stream.release())
            counts.note_ended()
            log.end(
                is_closed=stream.is_closed,
                is_idle=idle_timeout.has_expired,
                is_stopping=self._drain.is_draining,
                has_failed=stream.has_failed,
            )
            await asyncio.shield(releasing)
