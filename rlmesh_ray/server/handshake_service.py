"""What the services have in common: dispatch, Handshake and Shutdown, in each generation.

A service keeps a Reception and says what differs: its name, its frames, its capabilities.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple, Protocol

from rlmesh_ray import __version__
from rlmesh_ray.dialects.released.protocol.handshake import answer_released_offer, released_answer
from rlmesh_ray.dialects.released.wire import shutdown as released_shutdown
from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, answer_handshake
from rlmesh_ray.protocol.versions import GENERATIONS, PROTOCOL_V1, WIRE_V1
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.limits import FIRST_MESSAGE_TIMEOUT_S
from rlmesh_ray.wire.rlmesh_v1 import shutdown as edition_shutdown
from rlmesh_ray.wire.rlmesh_v1.shutdown import ShutdownRequest
from rlmesh_ray.wire.version_detection import (
    generation_of_handshake,
    generation_of_request,
    generation_of_shutdown,
)


class FirstMessage(NamedTuple):
    """The first message of a Join."""

    generation: str
    """Of the protocol."""
    frame: bytes


async def first_frame(requests: AsyncIterator[bytes]) -> bytes | None:
    """Take the first message off a stream; None: the stream has ended without one.

    Who goes on with ``async for`` gets the messages after it.
    """
    return await anext(aiter(requests), None)


async def first_message(
    requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext, *, is_known: bool = False
) -> bytes | None:
    """Take the first message off a stream, if it comes soon; see ``first_frame``.

    Args:
        requests: The stream's messages.
        context: Of its call, which is aborted else.
        is_known: Whether the client has shaken hands: then it may be building whatever it wants
            to say it with, and takes its time.
    """
    try:
        async with asyncio.timeout(None if is_known else FIRST_MESSAGE_TIMEOUT_S):
            return await first_frame(requests)
    except TimeoutError:
        silence = f"no message came on this stream for {FIRST_MESSAGE_TIMEOUT_S:g} s"
        reason = f"{silence}; open it when it is needed"
        await context.abort(grpc.StatusCode.ABORTED, reason)
        raise  # never reached: abort raises


class PrependedStream:
    """All messages of a stream, of which the first has been taken off.

    No generator: one that is left in the middle has to be closed, in a task of its own.
    """

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = aiter(rest)

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return first if first is not None else await anext(self._rest)


# What a client offers beyond these is not kept: it may be megabytes of nonsense.
_OPTIONAL = (
    capabilities.NDARRAY,
    capabilities.NUMBERED_REQUESTS,
    capabilities.SAME_STEP,
    capabilities.SHARED_MEMORY,
    capabilities.DIRECT_TCP,
)
_NUM_DIGITS = 32
_NUM_FLAG_DIGITS = 2


def new_session_id(offer: HandshakeRequest) -> str:
    """Return a session id that nobody can guess, for a client that can do what ``offer`` says."""
    flags = sum(1 << at for at, name in enumerate(_OPTIONAL) if name in offer.capabilities)
    return f"{flags:0{_NUM_FLAG_DIGITS}x}{secrets.token_hex((_NUM_DIGITS - _NUM_FLAG_DIGITS) // 2)}"


def capabilities_of_session(session_id: str) -> frozenset[str]:
    """Return the capabilities of the client with this session id; it may be any text."""
    is_id = len(session_id) == _NUM_DIGITS and set(session_id) <= set("0123456789abcdef")
    flags = int(session_id[:_NUM_FLAG_DIGITS], 16) if is_id else 0
    return frozenset(name for at, name in enumerate(_OPTIONAL) if flags >> at & 1)


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


class ServerHandshakeFrames(Protocol):
    """The part of a service's wire module that a Reception needs."""

    def parse_handshake_request(self, data: bytes) -> HandshakeRequest:
        """Return what the client offers. Raises CodecError when it is no handshake."""

    def pack_handshake_response(self, answer: HandshakeResponse) -> bytes:
        """Return the frame of the answer."""


class _ShutdownFrames(Protocol):
    def parse_shutdown_request(self, data: bytes) -> ShutdownRequest: ...
    def pack_shutdown_response(self, *, accepted: bool, message: str = "") -> bytes: ...


_SHUTDOWN_FRAMES: Mapping[str, _ShutdownFrames] = {
    PROTOCOL_V1: edition_shutdown,
    WIRE_V1: released_shutdown,
}


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What the operator allows clients."""

    shutdown: Callable[[], None] | None = None
    """Begins to stop the endpoint; None: clients may not."""
    on_close: Callable[[], None] | None = None
    """Called after each model session that a Close has ended; None: that ends nothing more."""
    accept_texts: frozenset[str] = frozenset()
    """The sha256 of edition texts that count as this package's own."""
    dialects: frozenset[str] = frozenset(GENERATIONS)
    """Names of the enabled dialects; the clients of any other one are refused."""
    idle_timeout_s: float | None = None
    """After how long without a request a session ends; None: never."""
    spin: bool | None = None
    """Whether a policy's loop stays awake for the next request; see ``polling.should_spin``."""


class HandshakeService:
    """Answers the calls that open and end things, for one service.

    Args:
        frames: The service's wire module of each generation.
        able: What the endpoint can do beyond the edition, by capability, in each generation.
        options: What clients may do.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
        obstacles: Why there can be no session, by generation; for none that can have one.
        on_request: Values for clients of the edition that offer the same capability, by
            capability; asked at each handshake.
    """

    def __init__(
        self,
        frames: Mapping[str, ServerHandshakeFrames],
        able: Mapping[str, Mapping[str, str]],
        options: ServiceOptions,
        contract: object = None,
        obstacles: Mapping[str, str] = MappingProxyType({}),
        on_request: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        self._frames = frames
        self._able = able
        self._options = options
        self._contract = contract
        self._on_request = on_request
        self._disabled = {each: _disabled(each, options) for each in {*frames} - options.dialects}
        self._obstacles = {**obstacles, **self._disabled}
        self._answers: Mapping[str, Callable[[HandshakeRequest], HandshakeResponse]] = {
            PROTOCOL_V1: self._answer_handshake,
            WIRE_V1: self._answer_released_handshake,
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
        offer = parsed(frames.parse_handshake_request, data)
        del data
        if isinstance(offer, CodecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(offer))
            raise AssertionError("abort raises")
        answer = self._answers[generation](offer)
        if came_through_gateway(context):
            told = {**answer.capabilities}
            told.pop(capabilities.DIRECT_TCP, None)  # the port is at another host
            answer = replace(answer, capabilities=told)
        return frames.pack_handshake_response(answer)

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
        stop = self._options.shutdown
        if stop is None or generation in self._disabled:
            _LOG.info("a client's Shutdown was refused (reason given: %.200r)", reason)
            message = self._disabled.get(generation, _REFUSAL)
            return frames.pack_shutdown_response(accepted=False, message=message)
        _LOG.warning("shutting down, as a client wants (reason given: %.200r)", reason)
        context.add_done_callback(lambda _: stop())
        return frames.pack_shutdown_response(
            accepted=True, message="stopping after what is outstanding"
        )

    def capabilities_of(self, context: grpc.aio.ServicerContext) -> frozenset[str]:
        """Return what the client of a Join has offered; empty for a stranger."""
        metadata = dict(context.invocation_metadata() or ())
        return capabilities_of_session(str(metadata.get(capabilities.SESSION_METADATA_KEY, "")))

    async def first_message(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> FirstMessage | None:
        """Return what the client of a Join says first; aborts the call if that is not spoken here.

        The message is not given again: who goes on with ``async for`` gets those after it.

        A client that has not shaken hands must say something soon; one that has may be building
        whatever it wants to say it with.

        Returns:
            None: the stream has ended before it has begun.
        """
        metadata = dict(context.invocation_metadata() or ())
        is_known = capabilities.SESSION_METADATA_KEY in metadata
        frame = await first_message(requests, context, is_known=is_known)
        if frame is None:
            return None
        words = FirstMessage(generation_of_request(frame), frame)
        if words.generation in self._obstacles:
            obstacle = self._obstacles[words.generation]
            del words, frame  # see ``parsed``
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, obstacle)
            raise AssertionError("abort raises")
        return words

    async def require_enabled(self, generation: str, context: grpc.aio.ServicerContext) -> None:
        """Abort the call of a client whose generation is not spoken here."""
        if generation in self._obstacles:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self._obstacles[generation])

    def _answer_handshake(self, offer: HandshakeRequest) -> HandshakeResponse:
        obstacle = self._obstacles.get(PROTOCOL_V1)
        if obstacle is not None:
            spoken = ", ".join(sorted(self._options.dialects))
            return HandshakeResponse(
                compatible=False,
                generation=spoken,
                min_generation=spoken,
                server_version=__version__,
                editions=(),
                error_message=obstacle,
            )
        asked = self._on_request.keys() & offer.capabilities.keys()
        able = {**self._able[PROTOCOL_V1], **{name: self._on_request[name]() for name in asked}}
        return answer_handshake(
            offer,
            server_version=__version__,
            capabilities={**able, capabilities.SESSION: new_session_id(offer)},
            contract=self._contract,
            accept_texts=self._options.accept_texts,
        )

    def _answer_released_handshake(self, offer: HandshakeRequest) -> HandshakeResponse:
        obstacle = self._obstacles.get(WIRE_V1)
        if obstacle is not None:
            return released_answer(__version__, reason=obstacle)
        return answer_released_offer(
            offer,
            server_version=__version__,
            capabilities=self._able[WIRE_V1],
            contract=self._contract,
        )


def _disabled(generation: str, options: ServiceOptions) -> str:
    return (
        f"this endpoint does not speak {generation}, only "
        f"{' and '.join(sorted(options.dialects))}: its operator has enabled these (dialects=…, "
        "--dialect)"
    )
