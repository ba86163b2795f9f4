"""Health checks of an endpoint, by grpc.health.v1."""

import enum
from dataclasses import dataclass

from rlmesh_ray.client.channel import ConnectOptions, translate_grpc_error
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import AccessDeniedError, CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.wire import health_v1 as wire

_NO_SERVICE = "the endpoint does not report its health (it has no grpc.health.v1)"


class HealthStatus(enum.Enum):
    """What is known of an endpoint's health."""

    SERVING = "SERVING"
    """It would serve a new session now."""
    NOT_SERVING = "NOT_SERVING"
    """It reports that it would not."""
    UNKNOWN = "UNKNOWN"
    """It answers, but does not report: other servers, older versions, no such service."""
    UNREACHABLE = "UNREACHABLE"
    """No answer, or none in time."""


_STATUS = {
    wire.SERVING: HealthStatus.SERVING,
    wire.NOT_SERVING: HealthStatus.NOT_SERVING,
}


@dataclass(frozen=True, slots=True)
class EndpointHealth:
    """The health of an endpoint, or of one of its services, when it was asked."""

    status: HealthStatus
    reason: str = ""
    """Why it is not SERVING, if that is known."""

    @property
    def is_serving(self) -> bool:
        return self.status is HealthStatus.SERVING


def check_health(
    connect_options: ConnectOptions, service: str = wire.WHOLE_ENDPOINT
) -> EndpointHealth:
    """Ask for the health of an endpoint; blocks for ``connect_options.timeout_s`` at most.

    Args:
        connect_options: How to reach it.
        service: Full name of one service, such as ``rlmesh.env.v1.EnvService``; default: all.

    Raises:
        AccessDeniedError: The endpoint requires another token.
        AddressError: The address is malformed.
    """
    dialect = client_dialect(connect_options.address)
    if dialect is not None and dialect.serves_models:
        return EndpointHealth(
            HealthStatus.UNKNOWN, f"a server of {dialect.name} has no grpc.health.v1"
        )
    with connect_options.open() as channel:
        method = channel.unary_unary(wire.CHECK)
        try:
            data, call = method.with_call(
                wire.pack_request(service),
                timeout=connect_options.timeout_s,
                metadata=connect_options.metadata,
            )
        except grpc.RpcError as error:
            return _without_answer(error, connect_options.address)
    try:
        status = _STATUS.get(wire.parse_response(data), HealthStatus.UNKNOWN)
    except CodecError as error:
        return EndpointHealth(HealthStatus.UNKNOWN, str(error))
    reason = dict(call.trailing_metadata() or ()).get(wire.REASON_METADATA_KEY, b"")
    return EndpointHealth(status, bytes(reason).decode(errors="replace"))


def _without_answer(error: grpc.RpcError, address: str) -> EndpointHealth:
    code = error.code() if isinstance(error, grpc.Call) else None
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return EndpointHealth(HealthStatus.UNKNOWN, _NO_SERVICE)
    if code is grpc.StatusCode.NOT_FOUND:
        return EndpointHealth(HealthStatus.UNKNOWN, error.details() or "no such service")
    translated = translate_grpc_error(error, address)
    if isinstance(translated, AccessDeniedError):
        raise translated from error
    return EndpointHealth(HealthStatus.UNREACHABLE, translated.message)
