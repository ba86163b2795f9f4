"""Plain values to EnvironmentResponses, as bytes; those to steps are made in ``agent_tensors``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf import any_pb2

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import ErrorResponse
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import TensorSpec, spec_to_proto
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import error_details, pb, properties
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import status as google_status
from rlmesh_ray.wire.protobuf import as_utf8, field

LEFT_WORLD: bytes = pb.EnvironmentResponse(leave_world={}).SerializeToString()
DESTROYED_WORLD: bytes = pb.EnvironmentResponse(destroy_world={}).SerializeToString()
RESET_WORLD: bytes = pb.EnvironmentResponse(reset_world={}).SerializeToString()

# Of EnvironmentResponse: the specification's own messages for properties.
_READ, _WRITTEN, _LISTED = b"\x42", b"\x4a", b"\x52"


@dataclass(frozen=True, slots=True)
class PropertyEntry:
    """A property, or a node with properties below it."""

    spec: TensorSpec
    """Its name is the whole key; its data type is INVALID for a node without a value."""
    description: str
    is_readable: bool = False
    is_writable: bool = False
    is_listable: bool = False


def pack_error(refusal: ErrorResponse) -> bytes:
    """Return the error response; a traceback goes into its details."""
    status = google_status.Status(code=int(refusal.code), message=as_utf8(refusal.message))
    if refusal.debug_info:
        detail = error_details.DebugInfo(detail=as_utf8(refusal.debug_info))
        status.details.add().Pack(detail)
    return bytes(pb.EnvironmentResponse(error=status).SerializeToString())


def pack_created(world_name: str) -> bytes:
    """Return the response to CreateWorld."""
    message = pb.EnvironmentResponse(create_world={"world_name": world_name})
    return bytes(message.SerializeToString())


def pack_joined(specs: Any) -> bytes:
    """Return the response to JoinWorld; ``specs`` is a ``pb.ActionObservationSpecs``."""
    return bytes(pb.EnvironmentResponse(join_world={"specs": specs}).SerializeToString())


def pack_reset(specs: Any) -> bytes:
    """Return the response to Reset; ``specs`` is a ``pb.ActionObservationSpecs``."""
    return bytes(pb.EnvironmentResponse(reset={"specs": specs}).SerializeToString())


def pack_read(values: Mapping[str, Any], *, is_core: bool) -> bytes:
    """Return the response to ReadProperties; ``values`` are ``pb.Tensor`` by key.

    The extension has room for one of them.
    """
    if is_core:
        return _core(_READ, pb.CreateWorldRequest(settings=values).SerializeToString())
    (value,) = values.values()
    return _extension(read_property=properties.ReadPropertyResponse(value=value))


def pack_written(*, is_core: bool) -> bytes:
    """Return the response to WriteProperties."""
    if is_core:
        return _core(_WRITTEN, b"")
    return _extension(write_property=properties.WritePropertyResponse())


def pack_listed(entries: Sequence[PropertyEntry], *, is_core: bool) -> bytes:
    """Return the response to ListProperties."""
    if is_core:
        return _core(_LISTED, b"".join(_map_entry(entry) for entry in entries))
    listed = [
        properties.PropertySpec(
            spec=spec_to_proto(entry.spec),
            is_readable=entry.is_readable,
            is_writable=entry.is_writable,
            is_listable=entry.is_listable,
            description=entry.description,
        )
        for entry in entries
    ]
    return _extension(list_property=properties.ListPropertyResponse(values=listed))


def _extension(**payload: Any) -> bytes:
    packed = any_pb2.Any()
    packed.Pack(properties.PropertyResponse(**payload))
    return bytes(pb.EnvironmentResponse(extension=packed).SerializeToString())


def _core(tag: bytes, message: bytes) -> bytes:
    # An empty message shows its kind, too.
    return field(tag, message) or tag + b"\x00"


def _map_entry(entry: PropertyEntry) -> bytes:
    """Return an entry of ``ListPropertyResponse.properties``."""
    flags = (entry.is_readable, entry.is_writable, entry.is_listable)
    flag_fields = b"".join(
        bytes((tag, 1)) for tag, flag in zip(b"\x08\x10\x18", flags, strict=True) if flag
    )
    spec = field(b"\x22", spec_to_proto(entry.spec).SerializeToString())
    key = field(b"\x0a", entry.spec.name.encode())
    return field(b"\x0a", key + field(b"\x12", flag_fields + spec))
