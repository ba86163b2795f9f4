"""Handshake, Shutdown and the first message of a Join, in every generation.

EnvService and ModelService each keep a ``HandshakeService`` with the dialects that they serve.
"""

import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import Protocol

from rlmesh_ray import __version__
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse, answer_handshake
from rlmesh_ray.server.endpoint.calls import first_message, parsed, refuse
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames

_LOG = logging.getLogger(__name__)

_SHUTDOWN_REFUSAL = (
    "clients may not shut this endpoint down; its operator can allow it with allow_shutdown=True "
    "(--allow-shutdown)"
)


# Other offered capabilities are not kept: a client may send megabytes of them.
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
    """Return a session id that cannot be guessed; it holds the capabilities of the client."""
    flags = sum(1 << at for at, name in enumerate(_OPTIONAL) if name in offer.capabilities)
    return f"{flags:0{_NUM_FLAG_DIGITS}x}{secrets.token_hex((_NUM_DIGITS - _NUM_FLAG_DIGITS) // 2)}"


def capabilities_of_session(session_id: str) -> frozenset[str]:
    is_id = len(session_id) == _NUM_DIGITS and set(session_id) <= set("0123456789abcdef")
    flags = int(session_id[:_NUM_FLAG_DIGITS], 16) if is_id else 0
    return frozenset(name for at, name in enumerate(_OPTIONAL) if flags >> at & 1)


def came_through_gateway(context: grpc.aio.ServicerContext) -> bool:
    return capabilities.GATEWAY_METADATA_KEY in dict(context.invocation_metadata() or ())


@dataclass(frozen=True, slots=True)
class GenerationHandshake:
    """How a generation besides the edition's is detected and its handshakes answered.

    The first three return whether a frame is the generation's: the frame of a Handshake, that of a
    Shutdown, the first one of a Join.
    """

    is_handshake: Callable[[bytes], bool]
    is_shutdown: Callable[[bytes], bool]
    is_request: Callable[[bytes], bool]
    answer: Callable[..., HandshakeResponse]
    """As ``released.protocol.answer_released_offer``."""


class ServedDialect(Protocol):
    """What a HandshakeService uses of a dialect."""

    @property
    def handshake_frames(self) -> HandshakeFrames: ...
    @property
    def handshake(self) -> GenerationHandshake | None:
        """None for the edition's generation: what no other one detects is its own."""


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What the operator of an endpoint has set for its clients."""

    shutdown: Callable[[], None] | None = None
    """Begins to stop the endpoint for a client's Shutdown; None: Shutdown is refused."""
    on_close: Callable[[], None] | None = None
    """Called after each model session that a Close has ended."""
    accept_texts: frozenset[str] = frozenset()
    """The sha256 of edition texts that are accepted like this package's own."""
    dialects: frozenset[str] = field(default_factory=lambda: frozenset(registry.model_dialects()))
    """Names of the enabled dialects; the clients of any other one are refused."""
    idle_timeout_s: float | None = None
    """Idle timeout of a session; None: it has none."""


class HandshakeService:
    """Answers Handshake and Shutdown, and reads the first message of a Join, for one service.

    Args:
        dialects: By generation.
        able: What the endpoint can do beyond the edition, by capability, in each generation.
        options: What the operator has set.
        contract: The ``EnvContract`` of an EnvService, None for a ModelService.
        obstacles: Why a session is impossible, for each generation for which it is.
        on_request: Values for clients of the edition that offer the same capability, by
            capability; called at each handshake.
    """

    def __init__(
        self,
        dialects: Mapping[str, ServedDialect],
        able: Mapping[str, Mapping[str, str]],
        options: ServiceOptions,
        contract: object = None,
        obstacles: Mapping[str, str] = MappingProxyType({}),
        on_request: Mapping[str, Callable[[], str]] = MappingProxyType({}),
    ) -> None:
        self._frames = {name: each.handshake_frames for name, each in dialects.items()}
        self._others = {
            name: each.handshake for name, each in dialects.items() if each.handshake is not None
        }
        self._able = able
        self._options = options
        self._contract = contract
        self._on_request = on_request
        enabled = " and ".join(sorted(options.dialects))
        self._disabled = {
            each: f"this endpoint does not speak {each}, only {enabled}: its operator has enabled "
            "these (dialects=…, --dialect)"
            for each in {*dialects} - options.dialects
        }
        self._obstacles = {**obstacles, **self._disabled}

    def handlers(
        self,
        service: str,
        join: Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], Awaitable[None]],
    ) -> grpc.GenericRpcHandler:
        """Return the gRPC handlers of the service; they take and return raw bytes.

        ``join`` writes its responses itself: a generator costs each of them more.
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
        generation = self._generation(attrgetter("is_handshake"), data)
        frames = self._frames[generation]
        offer = parsed(frames.parse_request, data)
        del data
        if isinstance(offer, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(offer))
        answer = self._answer(generation, offer)
        if came_through_gateway(context):
            usable = {**answer.capabilities}
            usable.pop(capabilities.DIRECT_TCP, None)  # the port is at another host
            answer = replace(answer, capabilities=usable)
        return frames.pack_response(answer)

    async def shutdown(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answer a Shutdown; if it is allowed, stop the endpoint after the outstanding requests."""
        generation = self._generation(attrgetter("is_shutdown"), data)
        frames = self._frames[generation]
        request = parsed(frames.parse_shutdown_request, data)
        del data
        if isinstance(request, CodecError):
            await refuse(context, grpc.StatusCode.INVALID_ARGUMENT, str(request))
        stop, obstacle = self._options.shutdown, self._disabled.get(generation, "")
        reason = request.reason
        if stop is None or obstacle:
            _LOG.info("a client's Shutdown was refused (reason given: %.200r)", reason)
            message = obstacle or _SHUTDOWN_REFUSAL
            return frames.pack_shutdown_response(accepted=False, message=message)
        _LOG.warning(
            "a client's Shutdown stops the endpoint (reason given: %.200r)", request.reason
        )
        context.add_done_callback(lambda _: stop())
        message = "stopping after the outstanding requests"
        return frames.pack_shutdown_response(accepted=True, message=message)

    async def first_message(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> tuple[str, bytes] | None:
        """Take the first message off a Join, and detect its generation.

        Aborts the call if the endpoint does not serve that generation, or if a client that has not
        shaken hands sends no message in time. None: the stream has ended without a message.
        """
        metadata = dict(context.invocation_metadata() or ())
        is_known = capabilities.SESSION_METADATA_KEY in metadata
        frame = await first_message(requests, context, is_known=is_known)
        if frame is None:
            return None
        generation = self._generation(attrgetter("is_request"), frame)
        if generation in self._obstacles:
            del frame  # see ``parsed``
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, self._obstacles[generation])
        return generation, frame

    async def require_enabled(self, generation: str, context: grpc.aio.ServicerContext) -> None:
        if generation in self._obstacles:
            await refuse(context, grpc.StatusCode.FAILED_PRECONDITION, self._obstacles[generation])

    def _generation(
        self, predicate: Callable[[GenerationHandshake], Callable[[bytes], bool]], data: bytes
    ) -> str:
        others = self._others.items()
        return next((name for name, each in others if predicate(each)(data)), PROTOCOL_V1)

    def _answer(self, generation: str, offer: HandshakeRequest) -> HandshakeResponse:
        refusal = self._obstacles.get(generation, "")
        if generation in self._others:
            return self._others[generation].answer(
                offer,
                server_version=__version__,
                capabilities=self._able[generation],
                contract=self._contract,
                refusal=refusal,
            )
        if refusal:
            enabled = ", ".join(sorted(self._options.dialects))
            return HandshakeResponse(
                compatible=False,
                generation=enabled,
                min_generation=enabled,
                server_version=__version__,
                editions=(),
                error_message=refusal,
            )
        requested = self._on_request.keys() & offer.capabilities.keys()
        able = {**self._able[generation], **{name: self._on_request[name]() for name in requested}}
        return answer_handshake(
            offer,
            server_version=__version__,
            capabilities={**able, capabilities.SESSION: new_session_id(offer)},
            contract=self._contract,
            accept_texts=self._options.accept_texts,
        )
