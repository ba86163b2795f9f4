"""The frames of Shutdown, which are the same for both services."""

from dataclasses import dataclass

from rlmesh_ray.wire._pb.rlmesh.env.v1 import service_pb2
from rlmesh_ray.wire.protobuf import as_utf8, parse


@dataclass(frozen=True, slots=True)
class ShutdownRequest:
    """ShutdownRequest of the edition: ask an endpoint to stop."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShutdownResponse:
    """ShutdownResponse of the edition: whether the endpoint will stop."""

    accepted: bool
    message: str = ""


def parse_shutdown_request(data: bytes) -> ShutdownRequest:
    """Return the request in ``data``. Raises CodecError where it is none."""
    return ShutdownRequest(parse(service_pb2.ShutdownRequest, data).reason)


def pack_shutdown_request(reason: str = "") -> bytes:
    """Return the frame of a ShutdownRequest."""
    return service_pb2.ShutdownRequest(reason=as_utf8(reason)).SerializeToString()


def parse_shutdown_response(data: bytes) -> ShutdownResponse:
    """Return the response in ``data``. Raises CodecError where it is none."""
    message = parse(service_pb2.ShutdownResponse, data)
    return ShutdownResponse(message.accepted, message.message)


def pack_shutdown_response(*, accepted: bool, message: str = "") -> bytes:
    """Return the frame of a ShutdownResponse."""
    response = service_pb2.ShutdownResponse(accepted=accepted, message=as_utf8(message))
    return response.SerializeToString()
