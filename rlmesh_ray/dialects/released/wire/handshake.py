"""Frames of the handshake and of Shutdown, and the detection of the generation in a first frame.

The generation has the gRPC paths of ``rlmesh.protocol.v1``, and other messages. A frame that is
malformed in both of them counts as the latter's, whose service refuses it.
"""

import platform
from collections.abc import Iterator

from rlmesh_ray.dialects.released.protocol import WIRE_V1
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
    message = env_pb.ShutdownRequest()
    message.base.reason = as_utf8(reason)
    message.base.SetInParent()
    return message.SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError if it is no such frame."""
    base = parse(env_pb.ShutdownResponse, data).base
    return ShutdownResponse(base.accepted, base.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    response = env_pb.ShutdownResponse()
    response.base.accepted, response.base.message = accepted, as_utf8(message)
    response.base.SetInParent()
    return response.SerializeToString()


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
# Field numbers that the first request of a stream has in this dialect only: request_id, and the
# kinds of requests that rlmesh.protocol.v1 does not have.
_OWN_FIELDS = frozenset({5, 6, 7})
_MOST_FIELDS = 64


def is_handshake(data: bytes) -> bool:
    """Return whether a ``HandshakeRequest`` or a ``ShutdownRequest`` is this dialect's.

    Its first field is a message; in ``rlmesh.protocol.v1`` it is the name of the generation or the
    reason of the shutdown.
    """
    number, value = next(_fields(data), (0, None))
    if number != 1 or value is None:
        return False
    # A name or a reason does not begin with a control character; the tags of the message's first
    # fields do. An empty value is a message, too: protobuf leaves out empty texts.
    return not value or value[0] < 0x20


is_shutdown = is_handshake


def is_request(data: bytes) -> bool:
    return any(number in _OWN_FIELDS for number, _ in _fields(data))


def _fields(data: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yield the number of each field, and the first byte of its value where that has a length.

    Stops at bytes that are no field.
    """
    at = 0
    for _ in range(_MOST_FIELDS):
        tag, at = _varint(data, at)
        if tag is None:
            return
        number, kind = tag >> 3, tag & 7
        if kind == _BYTES:
            size, at = _varint(data, at)
            if size is None or at + size > len(data):
                return
            yield number, data[at : at + min(size, 1)]
            at += size
        elif kind == _VARINT:
            value, at = _varint(data, at)
            if value is None:
                return
            yield number, None
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
            yield number, None
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int | None, int]:
    """Return the integer at ``at``, None where there is none, and where it ends."""
    number = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            return None, at
        part = data[at]
        at += 1
        number |= (part & 0x7F) << shift
        if part < 0x80:
            return number, at
    return None, at
