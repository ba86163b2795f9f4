"""Messages of Handshake and Shutdown, which EnvService and ModelService share.

Handshake messages differ between the services in field numbers only, Shutdown frames in nothing.
"""

from dataclasses import dataclass
from typing import Any

from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2 as env_pb
from rlmesh_ray.wire._pb.rlmesh.model.v1 import service_pb2 as model_pb
from rlmesh_ray.wire.protobuf import as_utf8, parse
from rlmesh_ray.wire.validation import few

AnyRequest = env_pb.HandshakeRequest | model_pb.HandshakeRequest
AnyResponse = env_pb.HandshakeResponse | model_pb.HandshakeResponse


MAX_CAPABILITIES = 1024
"""Most capabilities, and most editions, of either side."""


def capabilities_of(message: Any) -> dict[str, str]:
    """Return the capabilities in a message of a peer.

    Raises:
        CodecError: There are too many.
    """
    few(message.capabilities, "capabilities", MAX_CAPABILITIES)
    return dict(message.capabilities)


def editions_of(message: Any) -> tuple[str, ...]:
    """Return the editions in a message of a peer.

    Raises:
        CodecError: There are too many.
    """
    return few(message.supported_workflow_editions, "editions", MAX_CAPABILITIES)


def request_from_proto(message: AnyRequest) -> HandshakeRequest:
    """Return the client's offer. Raises CodecError if it has too many capabilities or editions."""
    return HandshakeRequest(
        generation=message.protocol_generation,
        client_name=message.client_name,
        client_version=message.client_version,
        editions=editions_of(message),
        capabilities=capabilities_of(message),
        spec_sha256=message.offered_edition_spec_sha256,
        status=message.offered_edition_status,
    )


def fill_request(message: AnyRequest, offer: HandshakeRequest) -> None:
    """Put ``offer`` into an empty message."""
    message.protocol_generation = offer.generation
    message.client_name = offer.client_name
    message.client_version = offer.client_version
    message.supported_workflow_editions.extend(offer.editions)
    message.capabilities.update(offer.capabilities)
    message.offered_edition_spec_sha256 = offer.spec_sha256
    message.offered_edition_status = offer.status


def response_from_proto(message: AnyResponse, contract: object) -> HandshakeResponse:
    """Return the server's answer.

    Args:
        message: The response message.
        contract: Its decoded contract; None where it has none.

    Raises:
        CodecError: It has too many capabilities or editions.
    """
    return HandshakeResponse(
        compatible=message.compatible,
        generation=message.server_protocol_generation,
        min_generation=message.min_supported_protocol_generation,
        server_version=message.server_version,
        editions=editions_of(message),
        capabilities=capabilities_of(message),
        selected_edition=message.selected_workflow_edition,
        spec_sha256=message.selected_edition_spec_sha256,
        status=message.selected_edition_status,
        error_message=message.error_message,
        contract=contract,
    )


def fill_response(message: AnyResponse, answer: HandshakeResponse) -> None:
    """Put ``answer`` without its contract into an empty message."""
    message.compatible = answer.compatible
    message.server_protocol_generation = answer.generation
    message.min_supported_protocol_generation = answer.min_generation
    message.server_version = answer.server_version
    message.supported_workflow_editions.extend(answer.editions)
    message.capabilities.update(answer.capabilities)
    message.selected_workflow_edition = answer.selected_edition
    message.selected_edition_spec_sha256 = answer.spec_sha256
    message.selected_edition_status = answer.status
    message.error_message = as_utf8(answer.error_message)


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """ShutdownRequest of the edition: ask an endpoint to stop."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShutdownResponse:
    """ShutdownResponse of the edition: whether the endpoint will stop."""

    accepted: bool
    message: str = ""


def parse_shutdown_request(data: bytes) -> ShutdownRequest:
    """Return the request in ``data``. Raises CodecError where it is none."""
    return ShutdownRequest(parse(env_pb.ShutdownRequest, data).reason)


def pack_shutdown_request(reason: str = "") -> bytes:
    """Return the frame of a ShutdownRequest."""
    return env_pb.ShutdownRequest(reason=as_utf8(reason)).SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError where it is none."""
    message = parse(env_pb.ShutdownResponse, data)
    return ShutdownResponse(message.accepted, message.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    """Return the frame of a ShutdownResponse."""
    response = env_pb.ShutdownResponse(accepted=accepted, message=as_utf8(message))
    return response.SerializeToString()
