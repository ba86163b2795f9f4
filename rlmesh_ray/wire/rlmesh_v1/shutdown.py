"""Shutdown, whose frames are the same for both services."""

from dataclasses import dataclass

from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, parse


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """Asks an endpoint to end."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShutdownResponse:
    """Whether it will."""

    accepted: bool
    message: str = ""


def parse_shutdown_request(data: bytes) -> ShutdownRequest:
    """Return the request in ``data``. Raises CodecError when it is none."""
    return ShutdownRequest(parse(service_pb2.ShutdownRequest, data).reason)


def pack_shutdown_request(reason: str = "") -> bytes:
    """Return the frame that asks an endpoint to end."""
    return service_pb2.ShutdownRequest(reason=as_utf8(reason)).SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError when it is none."""
    message = parse(service_pb2.ShutdownResponse, data)
    return ShutdownResponse(message.accepted, message.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    """Return the frame that tells whether the endpoint will end."""
    response = service_pb2.ShutdownResponse(accepted=accepted, message=as_utf8(message))
    return response.SerializeToString()
