"""Which generation an endpoint speaks: it is asked in each, the edition's first.

The generations share their paths and no message. An endpoint that does not know the one it is
asked in says so in some way: released servers fail to decode the message, ours answer in that
generation's form that they were told not to speak it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rlmesh_ray import __version__
from rlmesh_ray.client.channel import ConnectOptions, handshake_errors_at
from rlmesh_ray.dialects.released.protocol.handshake import (
    check_released_answer,
    make_released_offer,
)
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointError,
    HandshakeRefusedError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.handshake import (
    HandshakeRequest,
    HandshakeResponse,
    check_handshake_response,
    make_handshake_request,
)
from rlmesh_ray.protocol.versions import GENERATIONS, PROTOCOL_V1, WIRE_V1

_NAME = "rlmesh-ray"
# What servers answer to bytes that make no sense to them.
_NO_SENSE = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNKNOWN,
)


class ClientHandshakeFrames(Protocol):
    """The bytes of a service's handshake; modules of ``wire`` are such."""

    def pack_handshake_request(self, offer: HandshakeRequest) -> bytes:
        """Return the frame of ``offer``."""

    def parse_handshake_response(self, data: bytes) -> HandshakeResponse:
        """Return what a server replies; raises CodecError if ``data`` is no such frame."""


@dataclass(frozen=True, slots=True)
class HandshakeVariant:
    """How a service is greeted in one generation."""

    generation: str
    frames: ClientHandshakeFrames
    offer: HandshakeRequest
    check: Callable[[HandshakeRequest, HandshakeResponse], object]
    """Raises HandshakeRefusedError for an answer under which no session can be held."""


def handshake_variants(
    connect_options: ConnectOptions,
    edition: ClientHandshakeFrames,
    released: ClientHandshakeFrames,
    able: Sequence[str],
) -> tuple[HandshakeVariant, ...]:
    """Return how one service of an endpoint is greeted, the edition's generation first.

    Args:
        connect_options: The endpoint.
        edition: The service's frames in the edition's generation.
        released: Likewise, in that of the released rlmesh.
        able: What to tell the edition's server that this client can do.
    """
    offer = make_handshake_request(
        _NAME, __version__, dict.fromkeys(able, ""), text=connect_options.text_sha256
    )
    wire_offer = make_released_offer(_NAME, __version__, {})
    return (
        HandshakeVariant(PROTOCOL_V1, edition, offer, check_handshake_response),
        HandshakeVariant(
            WIRE_V1, released, wire_offer, lambda _, answer: check_released_answer(answer)
        ),
    )


def negotiate_handshake(
    connect_options: ConnectOptions,
    channel: grpc.Channel,
    path: str,
    variants: Sequence[HandshakeVariant],
) -> tuple[HandshakeVariant, HandshakeResponse]:
    """Shake hands in the first generation that the endpoint speaks.

    Args:
        connect_options: The endpoint.
        channel: To it.
        path: Of the handshake.
        variants: In order of preference; at least one.

    Returns:
        The greeting that was understood, and the answer.

    Raises:
        ConfigurationError: An edition's text is named for an endpoint whose generation has none.
        EndpointError: The endpoint cannot be reached.
        HandshakeRefusedError: It refuses, or speaks none of these generations.
    """
    end_s = time.monotonic() + connect_options.timeout_s
    first: EndpointError | HandshakeRefusedError | None = None
    for variant in variants:
        left_s = max(0.001, end_s - time.monotonic())
        try:
            answer = _ask(replace(connect_options, timeout_s=left_s), channel, path, variant)
        except (EndpointError, HandshakeRefusedError) as error:
            if _is_understood(variant, error):
                raise
            first = first or error
            continue
        _require_no_text(connect_options, variant)
        return variant, answer
    assert first is not None, "there is at least one greeting"
    raise first


def supported_generations(
    connect_options: ConnectOptions,
    channel: grpc.Channel,
    path: str,
    variants: Sequence[HandshakeVariant],
) -> tuple[str, ...]:
    """Return the generations in which sessions can be held with an endpoint.

    Args:
        connect_options: The endpoint.
        channel: To it.
        path: Of the handshake.
        variants: Whose generations to try.

    Raises:
        EndpointError: It cannot be reached.
    """
    spoken = []
    for variant in variants:
        try:
            _ask(connect_options, channel, path, variant)
        except HandshakeRefusedError:
            continue
        except EndpointError as error:
            if _is_understood(variant, error):
                raise
            continue
        spoken.append(variant.generation)
    return tuple(spoken)


def _ask(
    connect_options: ConnectOptions, channel: grpc.Channel, path: str, variant: HandshakeVariant
) -> HandshakeResponse:
    reply = connect_options.call(
        channel, path, variant.frames.pack_handshake_request(variant.offer)
    )
    with handshake_errors_at(connect_options.address):
        answer = variant.frames.parse_handshake_response(reply)
        if not answer.compatible and not _says_who_refuses(answer):
            raise CodecError("it says neither who refuses nor why")
        variant.check(variant.offer, answer)
    return answer


def _says_who_refuses(answer: HandshakeResponse) -> bool:
    """Tell whether a refusal is one: another generation's answer reads like one without words."""
    has_name = answer.generation != "" and answer.generation.isprintable()
    return has_name or answer.error_message != ""


def _is_understood(variant: HandshakeVariant, error: EndpointError | HandshakeRefusedError) -> bool:
    """Tell whether the endpoint has failed or refused for another reason than the generation."""
    cause = error.__cause__
    if isinstance(error, EndpointError):
        return not (isinstance(cause, grpc.Call) and cause.code() in _NO_SENSE)
    others = [each for each in GENERATIONS if each != variant.generation]
    is_of_other = any(generation in str(cause) for generation in others)
    return not isinstance(cause, CodecError) and not is_of_other


def _require_no_text(connect_options: ConnectOptions, variant: HandshakeVariant) -> None:
    if connect_options.edition_text is not None and variant.generation == WIRE_V1:
        raise ConfigurationError(
            f"{connect_options.address} speaks {WIRE_V1}, which has no edition text; leave out "
            "edition_text (--edition-text)"
        )
