"""Frames of ModelService: bytes to the messages of ``protocol.model_messages`` and back."""

from rlmesh_ray.dialects.released.wire import handshake
from rlmesh_ray.dialects.released.wire.model_requests import pack_request as pack_request
from rlmesh_ray.dialects.released.wire.model_requests import parse_request as parse_request
from rlmesh_ray.dialects.released.wire.model_responses import pack_response as pack_response
from rlmesh_ray.dialects.released.wire.model_responses import parse_response as parse_response
from rlmesh_ray.dialects.released.wire.model_responses import parse_timings as parse_timings
from rlmesh_ray.dialects.released.wire.model_responses import with_timings as with_timings
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2
from rlmesh_ray.wire.protobuf import parse

pack_shutdown_request = handshake.pack_shutdown_request
pack_shutdown_response = handshake.pack_shutdown_response
parse_shutdown_request = handshake.parse_shutdown_request
parse_shutdown_response = handshake.parse_shutdown_response


def parse_handshake_request(data: bytes) -> HandshakeRequest:
    """Return the offer of a client. Raises CodecError if ``data`` is no such frame."""
    return handshake.request_from_proto(parse(service_pb2.HandshakeRequest, data))


def pack_handshake_request(offer: HandshakeRequest) -> bytes:
    """Return the frame of ``offer``."""
    return service_pb2.HandshakeRequest(base=handshake.offer_to_base(offer)).SerializeToString()


def parse_handshake_response(data: bytes) -> HandshakeResponse:
    """Return the answer of a server. Raises CodecError if ``data`` is no such frame."""
    return handshake.response_from_proto(parse(service_pb2.HandshakeResponse, data), None)


def pack_handshake_response(answer: HandshakeResponse) -> bytes:
    """Return the frame of ``answer``; a model's answer carries no contract."""
    return service_pb2.HandshakeResponse(base=handshake.answer_to_base(answer)).SerializeToString()
