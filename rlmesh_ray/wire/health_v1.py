"""The frames of grpc.health.v1, gRPC's standard health checking protocol.

Functions that parse raise CodecError.
"""

from grpc_health.v1 import health_pb2

from rlmesh_ray.wire.protobuf import as_utf8, parse

SERVICE = "grpc.health.v1.Health"
CHECK = f"/{SERVICE}/Check"
WHOLE_ENDPOINT = ""
"""Service name that stands for all services of an endpoint."""

REASON_METADATA_KEY = "rlmesh-ray-health-reason-bin"
"""Key in a Check's trailing metadata: why the endpoint does not serve, in UTF-8."""


SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
"""For Watch only; a Check fails with NOT_FOUND."""


def pack_request(service: str = WHOLE_ENDPOINT) -> bytes:
    return bytes(health_pb2.HealthCheckRequest(service=as_utf8(service)).SerializeToString())


def parse_request(data: bytes) -> str:
    return str(parse(health_pb2.HealthCheckRequest, data).service)


def pack_response(status: int) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())


def parse_response(data: bytes) -> int:
    """Return the status in a HealthCheckResponse; other versions may send other numbers."""
    return int(parse(health_pb2.HealthCheckResponse, data).status)
