"""The shell of ModelService: each stream that comes gets a conversation."""

import asyncio
from collections.abc import AsyncIterator

from rlmesh_ray.protocol.capabilities import POLICY
from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.attention import attentive
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.model_conversation import ModelConversation
from rlmesh_ray.server.model_dialects import ABLE, DIALECTS, HANDSHAKES
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.reception import HouseRules, Reception
from rlmesh_ray.server.session_log import SessionLog
from rlmesh_ray.server.silence import Silence
from rlmesh_ray.wire import policy_v1

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
        self._idle_timeout_s = rules.idle_timeout_s
        self._spin = rules.spin
        self._drain = drain
        self._reception = Reception(
            HANDSHAKES, ABLE, rules, on_request={POLICY: lambda: policy_v1.pack(host.facts())}
        )

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
        generation, first = words
        conversation = ModelConversation(self._host, self._drain, DIALECTS[generation](), first)
        # It may be large, and the session lasts.
        del words, first
        silence = Silence(self._idle_timeout_s, lambda: conversation.is_asked)
        counts = self._host.sessions
        counts.note_opened()
        log = SessionLog(
            counts,
            context.peer(),
            generation,
            lambda: {"predictions": conversation.num_predicted},
        )
        requests = attentive(silence.heard(requests), lambda: counts.num_open == 1, self._spin)
        reader = asyncio.ensure_future(conversation.read(requests))
        try:
            while (frame := await conversation.outbox.get()) is not None:
                await context.write(frame)
                conversation.note_taken()
            if conversation.has_failed:
                await context.abort(grpc.StatusCode.INTERNAL, _FAULT)
            await silence.tell(context)
        finally:
            silence.stop()
            reader.cancel()
            # Also when the client has gone as soon as it had its answer.
            if conversation.is_closed and self._on_close is not None:
                self._on_close()
            # The stream's own cancellation must not cut the release short.
            releasing = asyncio.ensure_future(conversation.release())
            counts.note_ended()
            log.end(
                is_closed=conversation.is_closed,
                is_silent=silence.is_over,
                is_stopping=self._drain.is_wanted,
                has_failed=conversation.has_failed,
            )
            await asyncio.shield(releasing)
