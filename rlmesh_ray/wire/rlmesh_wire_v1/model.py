"""The frames of ModelService: bytes to the messages of ``protocol.adapter_messages`` and back."""

from rlmesh_ray.protocol.handshake import Answer, Offer
from rlmesh_ray.wire._pb.rlmesh_wire.model.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1.frames import parse
from rlmesh_ray.wire.rlmesh_wire_v1 import handshake
from rlmesh_ray.wire.rlmesh_wire_v1.model_requests import pack_request, parse_request
from rlmesh_ray.wire.rlmesh_wire_v1.model_responses import (
    pack_response,
    parse_response,
    parse_timings,
    timed,
)
from rlmesh_ray.wire.rlmesh_wire_v1.shutdown import (
    pack_shutdown_request,
    pack_shutdown_response,
    parse_shutdown_request,
    parse_shutdown_response,
)

__all__ = [
    "pack_answer",
    "pack_offer",
    "pack_request",
    "pack_response",
    "pack_shutdown_request",
    "pack_shutdown_response",
    "parse_answer",
    "parse_offer",
    "parse_request",
    "parse_response",
    "parse_shutdown_request",
    "parse_shutdown_response",
    "parse_timings",
    "timed",
]


def parse_offer(data: bytes) -> Offer:
    """Return what a runtime says first. Raises CodecError when ``data`` is no such frame."""
    return handshake.offer_from_proto(parse(service_pb2.HandshakeRequest, data))


def pack_offer(offer: Offer) -> bytes:
    """Return the frame of ``offer``."""
    return service_pb2.HandshakeRequest(base=handshake.offer_to_base(offer)).SerializeToString()


def parse_answer(data: bytes) -> Answer:
    """Return what a model replies. Raises CodecError when ``data`` is no such frame."""
    return handshake.answer_from_proto(parse(service_pb2.HandshakeResponse, data), None)


def pack_answer(answer: Answer) -> bytes:
    """Return the frame of ``answer``; a model's answer carries no contract."""
    return service_pb2.HandshakeResponse(base=handshake.answer_to_base(answer)).SerializeToString()
