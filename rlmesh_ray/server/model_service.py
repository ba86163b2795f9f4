"""The shell of ModelService: each stream that comes gets a conversation."""

import asyncio
from collections.abc import AsyncIterator

import grpc

from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.model_conversation import ModelConversation
from rlmesh_ray.server.model_dialects import ABLE, DIALECTS, HANDSHAKES
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.reception import HouseRules, Reception

SERVICE = "rlmesh.model.v1.ModelService"
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
        self._reception = Reception(HANDSHAKES, ABLE, rules)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        return self._reception.handlers(SERVICE, self.join)

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: each request answered once, each route's in order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        words = await self._reception.first_words(requests, context)
        if words is None:
            return
        dialect = DIALECTS[words.generation]()
        conversation = ModelConversation(self._host, self._drain, dialect, words.frame)
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
