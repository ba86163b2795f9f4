"""The frames of ModelService: bytes to the messages of ``protocol.model_messages`` and back."""

from rlmesh_ray.dialects.released.wire import handshake
from rlmesh_ray.dialects.released.wire.model_requests import pack_request, parse_request
from rlmesh_ray.dialects.released.wire.model_responses import (
    pack_response,
    parse_response,
    parse_timings,
    with_timings,
)
from rlmesh_ray.dialects.released.wire.shutdown import (
    pack_shutdown_request,
    pack_shutdown_response,
    parse_shutdown_request,
    parse_shutdown_response,
)
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2
from rlmesh_ray.wire.protobuf import parse

__all__ = [
    "pack_handshake_request",
    "pack_handshake_response",
    "pack_request",
    "pack_response",
    "pack_shutdown_request",
    "pack_shutdown_response",
    "parse_handshake_request",
    "parse_handshake_response",
    "parse_request",
    "parse_response",
    "parse_shutdown_request",
    "parse_shutdown_response",
    "parse_timings",
    "with_timings",
]


def parse_handshake_request(data: bytes) -> HandshakeRequest:
    """Return what a runtime says first. Raises CodecError when ``data`` is no such frame."""
    return handshake.request_from_proto(parse(service_pb2.HandshakeRequest, data))


def pack_handshake_request(offer: HandshakeRequest) -> bytes:
    """Return the frame of ``offer``."""
    return service_pb2.HandshakeRequest(base=handshake.offer_to_base(offer)).SerializeToString()


def parse_handshake_response(data: bytes) -> HandshakeResponse:
    """Return what a model replies. Raises CodecError when ``data`` is no such frame."""
    return handshake.response_from_proto(parse(service_pb2.HandshakeResponse, data), None)


def pack_handshake_response(answer: HandshakeResponse) -> bytes:
    """Return the frame of ``answer``; a model's answer carries no contract."""
    return service_pb2.HandshakeResponse(base=handshake.answer_to_base(answer)).SerializeToString()
