"""What the services have in common: dispatch, Handshake and Shutdown.

A service keeps a Reception and says what differs: its name, its frames, its capabilities.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import grpc

from rlmesh_ray import __version__
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import Answer, Offer, answer_offer
from rlmesh_ray.server.offers import Offers
from rlmesh_ray.wire.rlmesh_v1.shutdown import pack_shutdown_response, parse_shutdown_request

_LOG = logging.getLogger(__name__)

_REFUSAL = (
    "clients may not shut this endpoint down; its operator can allow it with allow_shutdown=True "
    "(--allow-shutdown)"
)

Join = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]
"""Serves a session, and writes its responses itself: a generator costs each of them more."""


class HandshakeFrames(Protocol):
    """The part of a service's wire module that a Reception needs."""

    def parse_offer(self, data: bytes) -> Offer:
        """Return what the client offers. Raises CodecError when it is no handshake."""

    def pack_answer(self, answer: Answer) -> bytes:
        """Return the frame of the answer."""


@dataclass(frozen=True, slots=True)
class HouseRules:
    """What the operator allows clients."""

    shutdown: Callable[[], None] | None = None
    """Begins to stop the endpoint; None: clients may not."""
    on_close: Callable[[], None] | None = None
    """Called after each model session that a Close has ended; None: that ends nothing more."""
    accept_texts: frozenset[str] = frozenset()
    """The sha256 of edition texts that count as this package's own."""


class Reception:
    """Answers the calls that open and end things, for one service.

    Args:
        frames: The service's wire module.
        able: What the endpoint can do beyond the edition, by capability.
        rules: What clients may do.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
    """

    def __init__(
        self,
        frames: HandshakeFrames,
        able: Mapping[str, str],
        rules: HouseRules,
        contract: object = None,
    ) -> None:
        self._frames = frames
        self._able = dict(able)
        self._rules = rules
        self._contract = contract
        self._offers = Offers()

    def handlers(self, service: str, join: Join) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to; frames stay raw bytes.

        Args:
            service: Full name, such as ``rlmesh.env.v1.EnvService``.
            join: Serves one session.
        """
        return grpc.method_handlers_generic_handler(
            service,
            {
                "Handshake": grpc.unary_unary_rpc_method_handler(self.handshake),
                "Join": grpc.stream_stream_rpc_method_handler(join),
                "Shutdown": grpc.unary_unary_rpc_method_handler(self.shutdown),
            },
        )

    async def handshake(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Negotiate the edition; tell the contract when compatible."""
        try:
            offer = self._frames.parse_offer(data)
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        answer = answer_offer(
            offer,
            server_version=__version__,
            capabilities={**self._able, capabilities.SESSION: self._offers.remember(offer)},
            contract=self._contract,
            accept_texts=self._rules.accept_texts,
        )
        return self._frames.pack_answer(answer)

    async def shutdown(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Stop the endpoint, after the answer, if the operator allows it."""
        try:
            reason = parse_shutdown_request(data).reason
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        stop = self._rules.shutdown
        if stop is None:
            _LOG.info("a client's Shutdown was refused (reason given: %.200r)", reason)
            return pack_shutdown_response(accepted=False, message=_REFUSAL)
        _LOG.warning("shutting down, as a client wants (reason given: %.200r)", reason)
        context.add_done_callback(lambda _: stop())
        return pack_shutdown_response(accepted=True, message="stopping after what is outstanding")

    def capabilities_of(self, context: grpc.aio.ServicerContext) -> frozenset[str]:
        """Return what the client of a Join has offered; empty for a stranger, and the next time."""
        metadata = dict(context.invocation_metadata() or ())
        return self._offers.claim(str(metadata.get(capabilities.SESSION_METADATA_KEY, "")))
