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
from rlmesh_ray.client.channel import Dial, handshake_with
from rlmesh_ray.errors import (
    CodecError,
    ConfigurationError,
    EndpointError,
    HandshakeRefusedError,
)
from rlmesh_ray.protocol.generations import GENERATIONS, PROTOCOL_V1, WIRE_V1
from rlmesh_ray.protocol.handshake import Answer, Offer, check_answer, make_offer
from rlmesh_ray.protocol.wire_handshake import check_wire_answer, make_wire_offer
from rlmesh_ray.rpc import grpc

_NAME = "rlmesh-ray"
# What servers answer to bytes that make no sense to them.
_NO_SENSE = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNKNOWN,
)


class HandshakeFrames(Protocol):
    """The bytes of a service's handshake; modules of ``wire`` are such."""

    def pack_offer(self, offer: Offer) -> bytes:
        """Return the frame of ``offer``."""

    def parse_answer(self, data: bytes) -> Answer:
        """Return what a server replies; raises CodecError if ``data`` is no such frame."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """How a service is greeted in one generation."""

    generation: str
    frames: HandshakeFrames
    offer: Offer
    check: Callable[[Offer, Answer], object]
    """Raises HandshakeRefusedError for an answer under which no session can be held."""


def greetings_of(
    dial: Dial, edition: HandshakeFrames, released: HandshakeFrames, able: Sequence[str]
) -> tuple[Greeting, ...]:
    """Return how one service of an endpoint is greeted, the edition's generation first.

    Args:
        dial: The endpoint.
        edition: The service's frames in the edition's generation.
        released: Likewise, in that of the released rlmesh.
        able: What to tell the edition's server that this client can do.
    """
    offer = make_offer(_NAME, __version__, dict.fromkeys(able, ""), text=dial.text_sha256)
    wire_offer = make_wire_offer(_NAME, __version__, {})
    return (
        Greeting(PROTOCOL_V1, edition, offer, check_answer),
        Greeting(WIRE_V1, released, wire_offer, lambda _, answer: check_wire_answer(answer)),
    )


def greet(
    dial: Dial, channel: grpc.Channel, path: str, greetings: Sequence[Greeting]
) -> tuple[Greeting, Answer]:
    """Shake hands in the first generation that the endpoint speaks.

    Args:
        dial: The endpoint.
        channel: To it.
        path: Of the handshake.
        greetings: In order of preference; at least one.

    Returns:
        The greeting that was understood, and the answer.

    Raises:
        ConfigurationError: An edition's text is named for an endpoint whose generation has none.
        EndpointError: The endpoint cannot be reached.
        HandshakeRefusedError: It refuses, or speaks none of these generations.
    """
    end_s = time.monotonic() + dial.timeout_s
    first: EndpointError | HandshakeRefusedError | None = None
    for greeting in greetings:
        left_s = max(0.001, end_s - time.monotonic())
        try:
            answer = _ask(replace(dial, timeout_s=left_s), channel, path, greeting)
        except (EndpointError, HandshakeRefusedError) as error:
            if _is_understood(greeting, error):
                raise
            first = first or error
            continue
        _require_no_text(dial, greeting)
        return greeting, answer
    assert first is not None, "there is at least one greeting"
    raise first


def understood(
    dial: Dial, channel: grpc.Channel, path: str, greetings: Sequence[Greeting]
) -> tuple[str, ...]:
    """Return the generations in which sessions can be held with an endpoint.

    Args:
        dial: The endpoint.
        channel: To it.
        path: Of the handshake.
        greetings: Whose generations to try.

    Raises:
        EndpointError: It cannot be reached.
    """
    spoken = []
    for greeting in greetings:
        try:
            _ask(dial, channel, path, greeting)
        except HandshakeRefusedError:
            continue
        except EndpointError as error:
            if _is_understood(greeting, error):
                raise
            continue
        spoken.append(greeting.generation)
    return tuple(spoken)


def _ask(dial: Dial, channel: grpc.Channel, path: str, greeting: Greeting) -> Answer:
    reply = dial.call(channel, path, greeting.frames.pack_offer(greeting.offer))
    with handshake_with(dial.address):
        answer = greeting.frames.parse_answer(reply)
        if not answer.compatible and not _says_who_refuses(answer):
            raise CodecError("it says neither who refuses nor why")
        greeting.check(greeting.offer, answer)
    return answer


def _says_who_refuses(answer: Answer) -> bool:
    """Tell whether a refusal is one: another generation's answer reads like one without words."""
    has_name = answer.generation != "" and answer.generation.isprintable()
    return has_name or answer.error_message != ""


def _is_understood(greeting: Greeting, error: EndpointError | HandshakeRefusedError) -> bool:
    """Tell whether the endpoint has failed or refused for another reason than the generation."""
    cause = error.__cause__
    if isinstance(error, EndpointError):
        return not (isinstance(cause, grpc.Call) and cause.code() in _NO_SENSE)
    others = [each for each in GENERATIONS if each != greeting.generation]
    is_of_other = any(generation in str(cause) for generation in others)
    return not isinstance(cause, CodecError) and not is_of_other


def _require_no_text(dial: Dial, greeting: Greeting) -> None:
    if dial.edition_text is not None and greeting.generation == WIRE_V1:
        raise ConfigurationError(
            f"{dial.address} speaks {WIRE_V1}, in which nobody shows an edition's text; leave "
            "out edition_text (--edition-text)"
        )
