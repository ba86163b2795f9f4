"""The frames of TransportService.OpenTcp: tickets for direct TCP connections.

Functions that parse raise CodecError.
"""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire._pb.rlmesh_ray.transport.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import parse

SERVICE = "rlmesh_ray.transport.v1.TransportService"
OPEN_TCP = f"/{SERVICE}/OpenTcp"


def pack_request(timeout_ms: int) -> bytes:
    """Return the OpenTcpRequest for steps with this timeout; 0: none."""
    return pb.OpenTcpRequest(timeout_ms=timeout_ms).SerializeToString()


def parse_request(data: bytes) -> int:
    return parse(pb.OpenTcpRequest, data).timeout_ms


def pack_response(ticket_id: bytes, key: bytes, endpoint: str) -> bytes:
    message = pb.OpenTcpResponse(ticket_id=ticket_id, key=key, endpoint=endpoint)
    return message.SerializeToString()


def parse_response(data: bytes, id_bytes: int, key_bytes: int) -> tuple[bytes, bytes, str]:
    """Return id, key and endpoint of the ticket in an OpenTcpResponse."""
    message = parse(pb.OpenTcpResponse, data)
    if len(message.ticket_id) != id_bytes or len(message.key) != key_bytes:
        raise CodecError(
            f"the ticket has {len(message.ticket_id)} and {len(message.key)} bytes, not "
            f"{id_bytes} and {key_bytes}"
        )
    return message.ticket_id, message.key, message.endpoint
