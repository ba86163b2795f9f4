"""What the services have in common: dispatch, Handshake and Shutdown, in each generation.

A service keeps a Reception and says what differs: its name, its frames, its capabilities.
"""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from rlmesh_ray import __version__
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.generations import GENERATIONS, PROTOCOL_V1, WIRE_V1
from rlmesh_ray.protocol.handshake import Answer, Offer, answer_offer
from rlmesh_ray.protocol.wire_handshake import answer_wire_offer, wire_answer
from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.first_words import FirstWords, first_words
from rlmesh_ray.server.offers import new_session_id, offered_by
from rlmesh_ray.wire.recognition import (
    generation_of_handshake,
    generation_of_request,
    generation_of_shutdown,
)
from rlmesh_ray.wire.rlmesh_v1 import shutdown as edition_shutdown
from rlmesh_ray.wire.rlmesh_v1.shutdown import ShutdownRequest
from rlmesh_ray.wire.rlmesh_wire_v1 import shutdown as released_shutdown

_LOG = logging.getLogger(__name__)

_REFUSAL = (
    "clients may not shut this endpoint down; its operator can allow it with allow_shutdown=True "
    "(--allow-shutdown)"
)

Join = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]]
"""Serves a session, and writes its responses itself: a generator costs each of them more."""


def came_through_gateway(context: grpc.aio.ServicerContext) -> bool:
    """Tell whether a call has been passed on by a gateway."""
    return capabilities.GATEWAY_METADATA_KEY in dict(context.invocation_metadata() or ())


class HandshakeFrames(Protocol):
    """The part of a service's wire module that a Reception needs."""

    def parse_offer(self, data: bytes) -> Offer:
        """Return what the client offers. Raises CodecError when it is no handshake."""

    def pack_answer(self, answer: Answer) -> bytes:
        """Return the frame of the answer."""


class _ShutdownFrames(Protocol):
    def parse_shutdown_request(self, data: bytes) -> ShutdownRequest: ...
    def pack_shutdown_response(self, *, accepted: bool, message: str = "") -> bytes: ...


_SHUTDOWN_FRAMES: Mapping[str, _ShutdownFrames] = {
    PROTOCOL_V1: edition_shutdown,
    WIRE_V1: released_shutdown,
}


@dataclass(frozen=True, slots=True)
class HouseRules:
    """What the operator allows clients."""

    shutdown: Callable[[], None] | None = None
    """Begins to stop the endpoint; None: clients may not."""
    on_close: Callable[[], None] | None = None
    """Called after each model session that a Close has ended; None: that ends nothing more."""
    accept_texts: frozenset[str] = frozenset()
    """The sha256 of edition texts that count as this package's own."""
    speaks: frozenset[str] = frozenset(GENERATIONS)
    """The generations whose clients are served; names of other languages tell those who are not."""
    idle_timeout_s: float | None = None
    """After how long without a request a session ends; None: never."""
    spin: bool | None = None
    """Whether a policy's loop stays awake for the next request; see ``waiting.spins``."""


class Reception:
    """Answers the calls that open and end things, for one service.

    Args:
        frames: The service's wire module of each generation.
        able: What the endpoint can do beyond the edition, by capability, in each generation.
        rules: What clients may do.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
        obstacles: Why there can be no session, by generation; for none that can have one.
        on_request: Values for clients of the edition that offer the same capability, by
            capability; asked at each handshake.
    """

    def __init__(
        self,
        frames: Mapping[str, HandshakeFrames],
        able: Mapping[str, Mapping[str, str]],
        rules: HouseRules,
        contract: object = None,
        obstacles: Mapping[str, str] = MappingProxyType({}),
        on_request: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        self._frames = frames
        self._able = able
        self._rules = rules
        self._contract = contract
        self._on_request = on_request
        self._unspoken = {each: _unspoken(each, rules) for each in {*frames} - rules.speaks}
        self._obstacles = {**obstacles, **self._unspoken}
        self._answers: Mapping[str, Callable[[Offer], Answer]] = {
            PROTOCOL_V1: self._answer_edition,
            WIRE_V1: self._answer_released,
        }

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
        generation = generation_of_handshake(data)
        frames = self._frames[generation]
        offer = parsed(frames.parse_offer, data)
        del data
        if isinstance(offer, CodecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(offer))
            raise AssertionError("abort raises")
        answer = self._answers[generation](offer)
        if came_through_gateway(context):
            told = {**answer.capabilities}
            told.pop(capabilities.DIRECT_TCP, None)  # the port is at another host
            answer = replace(answer, capabilities=told)
        return frames.pack_answer(answer)

    async def shutdown(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Stop the endpoint, after the answer, if the operator allows it."""
        generation = generation_of_shutdown(data)
        frames = _SHUTDOWN_FRAMES[generation]
        request = parsed(frames.parse_shutdown_request, data)
        del data
        if isinstance(request, CodecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(request))
            raise AssertionError("abort raises")
        reason = request.reason
        stop = self._rules.shutdown
        if stop is None or generation in self._unspoken:
            _LOG.info("a client's Shutdown was refused (reason given: %.200r)", reason)
            message = self._unspoken.get(generation, _REFUSAL)
            return frames.pack_shutdown_response(accepted=False, message=message)
        _LOG.warning("shutting down, as a client wants (reason given: %.200r)", reason)
        context.add_done_callback(lambda _: stop())
        return frames.pack_shutdown_response(
            accepted=True, message="stopping after what is outstanding"
        )

    def capabilities_of(self, context: grpc.aio.ServicerContext) -> frozenset[str]:
        """Return what the client of a Join has offered; empty for a stranger."""
        metadata = dict(context.invocation_metadata() or ())
        return offered_by(str(metadata.get(capabilities.SESSION_METADATA_KEY, "")))

    async def first_words(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> FirstWords | None:
        """Return what the client of a Join says first; aborts the call if that is not spoken here.

        The message is not given again: who goes on with ``async for`` gets those after it.

        A client that has not shaken hands must say something soon; one that has may be building
        whatever it wants to say it with.

        Returns:
            None: the stream has ended before it has begun.
        """
        metadata = dict(context.invocation_metadata() or ())
        is_known = capabilities.SESSION_METADATA_KEY in metadata
        frame = await first_words(requests, context, is_known=is_known)
        if frame is None:
            return None
        words = FirstWords(generation_of_request(frame), frame)
        if words.generation in self._obstacles:
            obstacle = self._obstacles[words.generation]
            del words, frame  # see ``parsed``
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, obstacle)
            raise AssertionError("abort raises")
        return words

    async def require_spoken(self, generation: str, context: grpc.aio.ServicerContext) -> None:
        """Abort the call of a client whose generation is not spoken here."""
        if generation in self._obstacles:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._obstacles[generation])

    def _answer_edition(self, offer: Offer) -> Answer:
        obstacle = self._obstacles.get(PROTOCOL_V1)
        if obstacle is not None:
            spoken = ", ".join(sorted(self._rules.speaks))
            return Answer(
                compatible=False,
                generation=spoken,
                min_generation=spoken,
                server_version=__version__,
                editions=(),
                error_message=obstacle,
            )
        asked = self._on_request.keys() & offer.capabilities.keys()
        able = {**self._able[PROTOCOL_V1], **{name: self._on_request[name]() for name in asked}}
        return answer_offer(
            offer,
            server_version=__version__,
            capabilities={**able, capabilities.SESSION: new_session_id(offer)},
            contract=self._contract,
            accept_texts=self._rules.accept_texts,
        )

    def _answer_released(self, offer: Offer) -> Answer:
        obstacle = self._obstacles.get(WIRE_V1)
        if obstacle is not None:
            return wire_answer(__version__, reason=obstacle)
        return answer_wire_offer(
            offer,
            server_version=__version__,
            capabilities=self._able[WIRE_V1],
            contract=self._contract,
        )


def _unspoken(generation: str, rules: HouseRules) -> str:
    return (
        f"this endpoint does not speak {generation}, only {' and '.join(sorted(rules.speaks))}: "
        "its operator has named these (speaks=…, --speak)"
    )
