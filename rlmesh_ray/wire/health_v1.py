"""grpc.health.v1: whether an endpoint serves, in the words that every gRPC tool knows."""

import enum

from grpc_health.v1 import health_pb2

from rlmesh_ray.wire.protobuf import as_utf8, parse

SERVICE = "grpc.health.v1.Health"
CHECK = f"/{SERVICE}/Check"
WHOLE_ENDPOINT = ""
"""Asks for all services of an endpoint together."""

REASON_METADATA_KEY = "rlmesh-ray-health-reason-bin"
"""Where the trailing metadata of a Check tell why an endpoint does not serve, in UTF-8."""


class ServingStatus(enum.Enum):
    """What a health response says."""

    UNKNOWN = health_pb2.HealthCheckResponse.UNKNOWN
    SERVING = health_pb2.HealthCheckResponse.SERVING
    NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
    SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    """To a Watch only; a Check fails with NOT_FOUND."""


def pack_request(service: str = WHOLE_ENDPOINT) -> bytes:
    """Return the frame that asks for the health of ``service``."""
    data: bytes = health_pb2.HealthCheckRequest(service=as_utf8(service)).SerializeToString()
    return data


def parse_request(data: bytes) -> str:
    """Return the service that ``data`` asks for. Raises CodecError when it is no request."""
    service: str = parse(health_pb2.HealthCheckRequest, data).service
    return service


def pack_response(status: ServingStatus) -> bytes:
    """Return the frame that tells ``status``."""
    data: bytes = health_pb2.HealthCheckResponse(status=status.value).SerializeToString()
    return data


def parse_response(data: bytes) -> ServingStatus:
    """Return the status in ``data``; UNKNOWN for one that has no name here.

    Raises:
        CodecError: It is no response.
    """
    number = parse(health_pb2.HealthCheckResponse, data).status
    known = {status.value: status for status in ServingStatus}
    return known.get(number, ServingStatus.UNKNOWN)
