"""Frames of the handshake and of Shutdown, which EnvService and ModelService share."""

import platform

from rlmesh_ray.dialects.released.protocol.rules import WIRE_V1
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.wire._pb.rlmesh_wire.core.v1 import handshake_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2 as env_pb
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2 as model_pb
from rlmesh_ray.wire.protobuf import as_utf8, parse
from rlmesh_ray.wire.rlmesh_v1.handshake import (
    ShutdownRequest,
    ShutdownResponse,
    capabilities_of,
    editions_of,
)

AnyRequest = env_pb.HandshakeRequest | model_pb.HandshakeRequest
AnyResponse = env_pb.HandshakeResponse | model_pb.HandshakeResponse

_COMPONENT = "rlmesh-ray"


def request_from_proto(message: AnyRequest) -> HandshakeRequest:
    """Return the offer in a client's handshake.

    Raises:
        CodecError: ``base`` is missing, or has too many capabilities or editions.
    """
    _require_base(message)
    base = message.base
    return HandshakeRequest(
        generation=base.protocol_generation,
        client_name=base.peer_info.component,
        client_version=base.peer_info.package_version,
        editions=editions_of(base),
        capabilities=capabilities_of(base),
    )


def offer_to_base(offer: HandshakeRequest) -> pb.HandshakeRequest:
    """Return the message of ``offer``."""
    return pb.HandshakeRequest(
        protocol_generation=offer.generation,
        peer_info=_peer_info(offer.client_name, offer.client_version),
        capabilities=offer.capabilities,
        supported_workflow_editions=offer.editions,
        preferred_workflow_edition=offer.editions[-1] if offer.editions else "",
    )


def response_from_proto(message: AnyResponse, contract: object) -> HandshakeResponse:
    """Return the answer in a server's handshake.

    Args:
        message: The reply.
        contract: The contract in it, decoded; None: it has none.

    Raises:
        CodecError: ``base`` is missing, or has too many capabilities or editions.
    """
    _require_base(message)
    base = message.base
    return HandshakeResponse(
        compatible=base.compatible,
        generation=WIRE_V1,
        min_generation=WIRE_V1,
        server_version=base.peer_info.package_version,
        editions=editions_of(base),
        capabilities=capabilities_of(base),
        selected_edition=base.preferred_workflow_edition,
        error_message=base.error_message,
        contract=contract,
    )


def answer_to_base(answer: HandshakeResponse) -> pb.HandshakeResponse:
    """Return the message of ``answer``, but for its contract."""
    return pb.HandshakeResponse(
        compatible=answer.compatible,
        peer_info=_peer_info(_COMPONENT, answer.server_version),
        capabilities=answer.capabilities,
        supported_workflow_editions=answer.editions,
        error_message=as_utf8(answer.error_message) if answer.error_message else None,
        preferred_workflow_edition=answer.selected_edition,
    )


def _peer_info(component: str, version: str) -> pb.PeerInfo:
    return pb.PeerInfo(
        component=component,
        package_version=version,
        language="python",
        language_version=platform.python_version(),
    )


def _require_base(message: AnyRequest | AnyResponse) -> None:
    if not message.HasField("base"):
        raise CodecError(f"{message.DESCRIPTOR.full_name} has no base")


def parse_shutdown_request(data: bytes) -> ShutdownRequest:
    """Return the request in ``data``. Raises CodecError if it is no such frame."""
    return ShutdownRequest(parse(env_pb.ShutdownRequest, data).base.reason)


def pack_shutdown_request(reason: str = "") -> bytes:
    """Return the frame of a client that asks an endpoint to stop."""
    message = env_pb.ShutdownRequest()
    message.base.reason = as_utf8(reason)
    message.base.SetInParent()
    return message.SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError if it is no such frame."""
    base = parse(env_pb.ShutdownResponse, data).base
    return ShutdownResponse(base.accepted, base.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    """Return the frame of the answer: whether the endpoint will stop, and why not."""
    response = env_pb.ShutdownResponse()
    response.base.accepted, response.base.message = accepted, as_utf8(message)
    response.base.SetInParent()
    return response.SerializeToString()
