"""The frames of RegistryService: registration of endpoints at a pool's registrar.

Functions that parse raise CodecError.
"""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.pool_membership import (
    RefusalKind,
    RegistrationAccepted,
    RegistrationRefused,
    RegistrationRequest,
)
from rlmesh_ray.wire._pb.rlmesh_ray.registry.v1 import service_pb2 as pb
from rlmesh_ray.wire.protobuf import as_utf8, parse

SERVICE = "rlmesh_ray.registry.v1.RegistryService"
ATTEND = f"/{SERVICE}/Attend"

MAX_REQUEST_BYTES = 4096
"""Above the size of a request with the longest names."""

_MAX_MESSAGE = 2000


def pack_registration(request: RegistrationRequest) -> bytes:
    """Return the AttendRequest of an endpoint; raises CodecError for a number beyond its field."""
    try:
        message = pb.AttendRequest(
            pool=as_utf8(request.pool),
            endpoint_id=as_utf8(request.endpoint_id),
            host=as_utf8(request.host),
            port=request.port,
            version=as_utf8(request.version),
            former_incarnation=request.former_incarnation,
        )
    except (TypeError, ValueError) as error:
        raise CodecError(f"the registration has no wire form: {error}") from error
    return message.SerializeToString()


def parse_registration(data: bytes) -> RegistrationRequest:
    message = parse(pb.AttendRequest, data)
    return RegistrationRequest(
        message.pool,
        message.endpoint_id,
        message.host,
        message.port,
        message.version,
        message.former_incarnation,
    )


def pack_registration_reply(answer: RegistrationAccepted | RegistrationRefused) -> bytes:
    message = pb.AttendResponse()
    if isinstance(answer, RegistrationAccepted):
        message.registered.incarnation = answer.incarnation
        message.registered.address = as_utf8(answer.address)
    else:
        message.refusal.kind = answer.kind.value  # type: ignore[assignment]  # enums are ints
        message.refusal.message = as_utf8(answer.message[:_MAX_MESSAGE])
    return message.SerializeToString()


def parse_registration_reply(data: bytes) -> RegistrationAccepted | RegistrationRefused:
    message = parse(pb.AttendResponse, data)
    match message.WhichOneof("kind"):
        case "registered":
            return RegistrationAccepted(message.registered.incarnation, message.registered.address)
        case "refusal":
            return RegistrationRefused(RefusalKind(message.refusal.kind), message.refusal.message)
    raise CodecError("the frame holds neither a registration nor a refusal")
