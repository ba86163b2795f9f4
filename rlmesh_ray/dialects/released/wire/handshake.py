"""Frames of the handshake and of Shutdown, and the detection of the generation in a first frame.

The generation has the gRPC paths of ``rlmesh.protocol.v1``, and other messages. A frame that is
malformed in both of them counts as the latter's, whose service refuses it.
"""

import platform
from collections.abc import Iterator
from typing import Any

from rlmesh_ray.dialects.released.protocol import WIRE_V1
from rlmesh_ray.dialects.released.wire.specs import contract_from_proto, contract_to_proto
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.handshake import HandshakeRequest, HandshakeResponse
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire._pb.rlmesh_wire.core.v1 import handshake_pb2 as pb
from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2 as env_pb
from rlmesh_ray.wire.protobuf import as_utf8, parse, size_at, varint_at
from rlmesh_ray.wire.rlmesh_v1.handshake import (
    HandshakeFrames,
    ShutdownRequest,
    ShutdownResponse,
    capabilities_of,
    editions_of,
)

_COMPONENT = "rlmesh-ray"


def _peer_info(component: str, version: str) -> pb.PeerInfo:
    return pb.PeerInfo(
        component=component,
        package_version=version,
        language="python",
        language_version=platform.python_version(),
    )


def _with_base(message: Any) -> Any:
    if not message.HasField("base"):
        raise CodecError(f"{message.DESCRIPTOR.full_name} has no base")
    return message


class ReleasedHandshakeFrames(HandshakeFrames):
    """Handshake frames of one service of this generation; both services nest the same message."""

    def parse_request(self, data: bytes) -> HandshakeRequest:
        """Return the client's offer; one without ``base`` is refused, too."""
        base = _with_base(parse(self._service.HandshakeRequest, data)).base
        return HandshakeRequest(
            generation=base.protocol_generation,
            client_name=base.peer_info.component,
            client_version=base.peer_info.package_version,
            editions=editions_of(base),
            capabilities=capabilities_of(base),
        )

    def pack_request(self, offer: HandshakeRequest) -> bytes:
        base = pb.HandshakeRequest(
            protocol_generation=offer.generation,
            peer_info=_peer_info(offer.client_name, offer.client_version),
            capabilities=offer.capabilities,
            supported_workflow_editions=offer.editions,
            preferred_workflow_edition=offer.editions[-1] if offer.editions else "",
        )
        return bytes(self._service.HandshakeRequest(base=base).SerializeToString())

    def parse_response(self, data: bytes) -> HandshakeResponse:
        message = _with_base(parse(self._service.HandshakeResponse, data))
        base, contract = message.base, None
        if self._service is env_pb and base.compatible and message.HasField("env_contract"):
            contract = contract_from_proto(message.env_contract)
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

    def pack_response(self, answer: HandshakeResponse) -> bytes:
        base = pb.HandshakeResponse(
            compatible=answer.compatible,
            peer_info=_peer_info(_COMPONENT, answer.server_version),
            capabilities=answer.capabilities,
            supported_workflow_editions=answer.editions,
            error_message=as_utf8(answer.error_message) if answer.error_message else None,
            preferred_workflow_edition=answer.selected_edition,
        )
        message = self._service.HandshakeResponse(base=base)
        if self._service is env_pb and isinstance(answer.contract, EnvContract):
            message.env_contract.CopyFrom(contract_to_proto(answer.contract))
        return bytes(message.SerializeToString())

    def parse_shutdown_request(self, data: bytes) -> ShutdownRequest:
        return ShutdownRequest(parse(env_pb.ShutdownRequest, data).base.reason)

    def pack_shutdown_request(self, reason: str = "") -> bytes:
        message = env_pb.ShutdownRequest()
        message.base.reason = as_utf8(reason)
        message.base.SetInParent()
        return message.SerializeToString()

    def parse_shutdown_response(self, data: bytes) -> ShutdownResponse:
        base = parse(env_pb.ShutdownResponse, data).base
        return ShutdownResponse(base.accepted, base.message)

    def pack_shutdown_response(self, *, accepted: bool, message: str = "") -> bytes:
        response = env_pb.ShutdownResponse()
        response.base.accepted, response.base.message = accepted, as_utf8(message)
        response.base.SetInParent()
        return response.SerializeToString()


_BYTES = 2
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
    try:
        for _ in range(_MOST_FIELDS):
            tag, at = varint_at(data, at)
            size, start = size_at(data, at, tag & 7)
            at = start + size
            if tag & 7 != _BYTES:
                yield tag >> 3, None
            elif at <= len(data):
                yield tag >> 3, data[start : min(start + 1, at)]
            else:
                return
    except (IndexError, KeyError):
        return
