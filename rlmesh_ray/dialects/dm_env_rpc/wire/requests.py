"""EnvironmentRequests to plain values.

The fields 8 to 10 are reserved in today's published schema. The specification has its core
messages for properties there, whose forms other messages happen to have: a list of keys is a
``Tensor.StringArray``, a map of properties the settings of a ``CreateWorldRequest``.
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.unknown_fields import UnknownFieldSet

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import (
    Code,
    CreateWorld,
    DestroyWorld,
    ErrorResponse,
    JoinWorld,
    LeaveWorld,
    ListProperties,
    MalformedWorldRequest,
    ReadProperties,
    ResetAgent,
    ResetWorld,
    StepWorld,
    WorldRequest,
    WriteProperties,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import pb, properties
from rlmesh_ray.errors import CodecError
from rlmesh_ray.wire.protobuf import parse

PROPERTIES_TYPE = properties.PropertyRequest.DESCRIPTOR.full_name
_LONGEST_QUOTE = 200


def parse_request(data: bytes) -> WorldRequest:
    """Return the request in ``data``, or a MalformedWorldRequest."""
    try:
        message = parse(pb.EnvironmentRequest, data)
    except CodecError as error:
        return _unreadable(Code.INVALID_ARGUMENT, str(error))
    kind = message.WhichOneof("payload")
    if kind == "step":
        step = message.step
        return StepWorld(step.actions, tuple(step.requested_observations))
    try:
        return _READERS[kind](message) if kind is not None else _core_property(message)
    except CodecError as error:
        return _unreadable(Code.INVALID_ARGUMENT, str(error))


def _unreadable(code: Code, message: str) -> MalformedWorldRequest:
    return MalformedWorldRequest(ErrorResponse(code, message))


def _extension(message: Any) -> WorldRequest:
    extension = message.extension
    name = extension.type_url.rpartition("/")[2]
    if name != PROPERTIES_TYPE:
        return _unreadable(
            Code.UNIMPLEMENTED,
            f"extension {name[:_LONGEST_QUOTE]!r} is not known here; {PROPERTIES_TYPE} is",
        )
    request = parse(properties.PropertyRequest, extension.value)
    match request.WhichOneof("payload"):
        case "read_property":
            return ReadProperties((request.read_property.key,), is_core=False)
        case "write_property":
            write = request.write_property
            return WriteProperties({write.key: write.value}, is_core=False)
        case "list_property":
            return ListProperties((request.list_property.key,), is_core=False)
    return _unreadable(Code.INVALID_ARGUMENT, "a PropertyRequest without a payload")


def _core_property(message: Any) -> WorldRequest:
    unknown: Any = UnknownFieldSet(message)  # its type stubs lack the iteration
    for field in unknown:
        reader = _CORE_READERS.get(field.field_number)
        if reader is not None and isinstance(field.data, bytes):
            return reader(field.data)
    return _unreadable(
        Code.INVALID_ARGUMENT, "an EnvironmentRequest without a payload that is known here"
    )


def _keys(data: bytes) -> tuple[str, ...]:
    return tuple(parse(pb.Tensor.StringArray, data).array)


_READERS: Mapping[str, Callable[[Any], WorldRequest]] = {
    "create_world": lambda message: CreateWorld(message.create_world.settings),
    "join_world": lambda message: JoinWorld(
        message.join_world.world_name, message.join_world.settings
    ),
    "reset": lambda message: ResetAgent(message.reset.settings),
    "reset_world": lambda message: ResetWorld(
        message.reset_world.world_name, message.reset_world.settings
    ),
    "leave_world": lambda _: LeaveWorld(),
    "destroy_world": lambda message: DestroyWorld(message.destroy_world.world_name),
    "extension": _extension,
}
_CORE_READERS: Mapping[int, Callable[[bytes], WorldRequest]] = {
    8: lambda data: ReadProperties(_keys(data), is_core=True),
    9: lambda data: WriteProperties(parse(pb.CreateWorldRequest, data).settings, is_core=True),
    10: lambda data: ListProperties(_keys(data), is_core=True),
}
