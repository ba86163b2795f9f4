"""The frames of EnvService: bytes to the messages of ``protocol`` and back."""

from rlmesh_ray.protocol.handshake import Answer, Offer
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2
from rlmesh_ray.wire.rlmesh_v1.frames import parse
from rlmesh_ray.wire.rlmesh_wire_v1 import handshake
from rlmesh_ray.wire.rlmesh_wire_v1.contract import contract_from_proto, contract_to_proto
from rlmesh_ray.wire.rlmesh_wire_v1.env_requests import pack_request, parse_request
from rlmesh_ray.wire.rlmesh_wire_v1.env_responses import pack_response, parse_response, timed
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
    "timed",
]


def parse_offer(data: bytes) -> Offer:
    """Return what a client says first. Raises CodecError when ``data`` is no such frame."""
    return handshake.offer_from_proto(parse(service_pb2.HandshakeRequest, data))


def pack_offer(offer: Offer) -> bytes:
    """Return the frame of ``offer``."""
    return service_pb2.HandshakeRequest(base=handshake.offer_to_base(offer)).SerializeToString()


def parse_answer(data: bytes) -> Answer:
    """Return what a server replies, with the ``EnvContract`` of a compatible one.

    Raises:
        CodecError: ``data`` is no such frame, or its contract makes no sense.
    """
    message = parse(service_pb2.HandshakeResponse, data)
    has_contract = message.base.compatible and message.HasField("env_contract")
    contract = contract_from_proto(message.env_contract) if has_contract else None
    return handshake.answer_from_proto(message, contract)


def pack_answer(answer: Answer) -> bytes:
    """Return the frame of ``answer``; its contract is an ``EnvContract`` or None."""
    message = service_pb2.HandshakeResponse(base=handshake.answer_to_base(answer))
    if isinstance(answer.contract, EnvContract):
        message.env_contract.CopyFrom(contract_to_proto(answer.contract))
    return message.SerializeToString()
