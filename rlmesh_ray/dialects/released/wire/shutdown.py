"""Shutdown, whose frames are the same for both services."""

from rlmesh_ray.wire._pb.rlmesh_wire.env.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, parse
from rlmesh_ray.wire.rlmesh_v1.shutdown import ShutdownRequest, ShutdownResponse


def parse_shutdown_request(data: bytes) -> ShutdownRequest:
    """Return the request in ``data``. Raises CodecError when it is none."""
    return ShutdownRequest(parse(service_pb2.ShutdownRequest, data).base.reason)


def pack_shutdown_request(reason: str = "") -> bytes:
    """Return the frame that asks an endpoint to end."""
    message = service_pb2.ShutdownRequest()
    message.base.reason = as_utf8(reason)
    message.base.SetInParent()
    return message.SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError when it is none."""
    base = parse(service_pb2.ShutdownResponse, data).base
    return ShutdownResponse(base.accepted, base.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    """Return the frame that tells whether the endpoint will end."""
    response = service_pb2.ShutdownResponse()
    response.base.accepted, response.base.message = accepted, as_utf8(message)
    response.base.SetInParent()
    return response.SerializeToString()
