"""Detection of an endpoint's generation: a handshake in each of them, the edition's first.

Generations share their gRPC paths and no message. An endpoint that does not serve a generation
fails to decode its handshake (released servers), or refuses it in that generation's form (ours).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions, handshake_errors_at
from rlmesh_ray.dialects.registry import load_generations, model_dialects
from rlmesh_ray.errors import CodecError, ConfigurationError, EndpointError, HandshakeRefusedError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    check_handshake_response,
    make_handshake_request,
)

CLIENT_NAME = "rlmesh-ray"
# Status codes of servers that cannot decode a message.
_UNDECODABLE = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNKNOWN,
)


class ClientHandshakeFrames(Protocol):
    """Frames of a service's handshake: part of a dialect's wire module for the service."""

    def pack_handshake_request(self, offer: HandshakeRequest) -> bytes:
        """Return the frame of ``offer``."""

    def parse_handshake_response(self, data: bytes) -> HandshakeResponse:
        """Return the answer of a server; raises CodecError if ``data`` is no such frame."""


MakeT = TypeVar("MakeT", bound=Callable[..., object])


@dataclass(frozen=True, slots=True)
class HandshakeVariant(Generic[MakeT]):
    """The handshake of a service in one generation, and the dialect of sessions after it."""

    generation: str
    frames: ClientHandshakeFrames
    offer: HandshakeRequest
    accept: Callable[[HandshakeRequest, HandshakeResponse], HandshakeResponse]
    """Returns the answer with the edition's names for capabilities. Raises HandshakeRefusedError
    for an answer under which no session can be held."""
    make_dialect: MakeT
    """Makes the dialect of a session."""


@dataclass(frozen=True, slots=True)
class ServiceHandshake(Generic[MakeT]):
    """The handshakes of one service, in all generations of this package."""

    path: str
    """gRPC path of the handshake."""
    frames: ClientHandshakeFrames
    """The service's frames in the edition's generation."""
    able: Sequence[str]
    """Capabilities of this client in the edition's generation."""
    make_dialect: MakeT
    """Makes the edition's dialect of a session."""
    module: str
    """The module of a generation's package that has its variant."""

    def variants(self, connect_options: ConnectOptions) -> tuple[HandshakeVariant[MakeT], ...]:
        offer = make_handshake_request(
            CLIENT_NAME,
            __version__,
            dict.fromkeys(self.able, ""),
            text=connect_options.text_sha256,
        )
        edition = HandshakeVariant(
            PROTOCOL_V1, self.frames, offer, _accept_edition, self.make_dialect
        )
        return edition, *load_generations(self.module).values()

    def negotiate(
        self, connect_options: ConnectOptions, channel: grpc.Channel
    ) -> tuple[HandshakeVariant[MakeT], HandshakeResponse]:
        """Shake hands in the first generation that the endpoint serves.

        Returns:
            The variant that the endpoint has accepted, and its answer.

        Raises:
            ConfigurationError: An edition's text is named for an endpoint whose generation has
                none.
            EndpointError: The endpoint cannot be reached.
            HandshakeRefusedError: It refuses, or serves none of these generations.
        """
        end_s = time.monotonic() + connect_options.timeout_s
        first: EndpointError | HandshakeRefusedError | None = None
        for variant in self.variants(connect_options):
            left_s = max(0.001, end_s - time.monotonic())
            try:
                answer = _ask(
                    replace(connect_options, timeout_s=left_s), channel, self.path, variant
                )
            except (EndpointError, HandshakeRefusedError) as error:
                if _is_understood(variant, error):
                    raise
                first = first or error
                continue
            _require_no_text(connect_options, variant)
            return variant, answer
        assert first is not None, "there is at least one variant"
        raise first

    def generations(self, connect_options: ConnectOptions) -> tuple[str, ...]:
        """Return the generations in which sessions can be held with an endpoint.

        Raises:
            EndpointError: It cannot be reached.
        """
        supported = []
        with connect_options.open() as channel:
            for variant in self.variants(connect_options):
                try:
                    _ask(connect_options, channel, self.path, variant)
                except HandshakeRefusedError:
                    continue
                except EndpointError as error:
                    if _is_understood(variant, error):
                        raise
                    continue
                supported.append(variant.generation)
        return tuple(supported)


def _accept_edition(offer: HandshakeRequest, answer: HandshakeResponse) -> HandshakeResponse:
    check_handshake_response(offer, answer)
    return answer


def _ask(
    connect_options: ConnectOptions,
    channel: grpc.Channel,
    path: str,
    variant: HandshakeVariant[MakeT],
) -> HandshakeResponse:
    reply = connect_options.call(
        channel, path, variant.frames.pack_handshake_request(variant.offer)
    )
    with handshake_errors_at(connect_options.address):
        answer = variant.frames.parse_handshake_response(reply)
        if not answer.compatible and not _is_refusal(answer):
            raise CodecError("it refuses without a generation and without a reason")
        return variant.accept(variant.offer, answer)


def _is_refusal(answer: HandshakeResponse) -> bool:
    """Return whether an answer is a refusal, and not another generation's, which decodes as one."""
    has_name = answer.generation != "" and answer.generation.isprintable()
    return has_name or answer.error_message != ""


def _is_understood(
    variant: HandshakeVariant[MakeT], error: EndpointError | HandshakeRefusedError
) -> bool:
    """Return whether the endpoint has failed or refused for another reason than the generation."""
    cause = error.__cause__
    if isinstance(error, EndpointError):
        return not (isinstance(cause, grpc.Call) and cause.code() in _UNDECODABLE)
    others = [each for each in model_dialects() if each != variant.generation]
    is_of_other = any(generation in str(cause) for generation in others)
    return not isinstance(cause, CodecError) and not is_of_other


def _require_no_text(connect_options: ConnectOptions, variant: HandshakeVariant[MakeT]) -> None:
    if connect_options.edition_text is not None and variant.generation != PROTOCOL_V1:
        raise ConfigurationError(
            f"{connect_options.address} speaks {variant.generation}, which has no edition text; "
            "leave out edition_text (--edition-text)"
        )
