"""The properties of an endpoint, and of the world that a stream has joined.

Clients ask for them with the published extension, or with the core messages of the specification.
Those have the fields 8 to 10, which are reserved in today's published schema, and forms that other
messages happen to have: a list of keys is a ``Tensor.StringArray``, a map of properties the
settings of a ``CreateWorldRequest``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.unknown_fields import UnknownFieldSet

from rlmesh_ray import __version__
from rlmesh_ray.dialects.dm_env_rpc.protocol import Code, WorldError
from rlmesh_ray.dialects.dm_env_rpc.server.settings import ResetOptions, as_seed, plain_setting
from rlmesh_ray.dialects.dm_env_rpc.server.worlds import WorldRunner
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import AgentSlot
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    CONTRACT,
    DataType,
    contract_to_text,
    pack_tensor,
    pb,
    properties,
)
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.protobuf import field, parse

Membership = tuple[WorldRunner, AgentSlot]
ROOT = "rlmesh"
WORLD = "rlmesh.world"
PROPERTIES_TYPE = properties.PropertyRequest.DESCRIPTOR.full_name
_LONGEST_QUOTE = 80
_LONGEST_NAME = 200
# Fields of EnvironmentRequest, and of EnvironmentResponse.
_READ, _WRITE, _LIST = 8, 9, 10


@dataclass(frozen=True, slots=True)
class Property:
    """A property with a value, or a node with properties below it."""

    key: str
    dtype: DataType
    """INVALID for a node."""
    description: str
    read: Callable[[], object] | None = None
    write: Callable[[object], None] | None = None
    """Raises CodecError for a value that it does not accept."""

    def flags(self) -> tuple[bool, bool, bool]:
        """Return whether it is readable, writable and listable."""
        is_node = self.dtype is DataType.INVALID
        return self.read is not None, self.write is not None, is_node

    def spec(self) -> Any:
        return pb.TensorSpec(name=self.key, dtype=int(self.dtype))


class Properties:
    """Answers requests for properties.

    Args:
        contract: The endpoint's.
    """

    def __init__(self, contract: EnvContract) -> None:
        text = contract_to_text(contract)
        self._universal = (
            Property(ROOT, DataType.INVALID, "this endpoint"),
            Property(
                CONTRACT,
                DataType.STRING,
                "spaces, lanes and autoreset mode: an rlmesh.env.v1.EnvContract in JSON",
                lambda: text,
            ),
            Property(
                "rlmesh.version", DataType.STRING, "of the endpoint's software", lambda: __version__
            ),
        )

    def answer_extension(self, extension: Any, member: Membership | None) -> bytes:
        name = extension.type_url.rpartition("/")[2]
        if name != PROPERTIES_TYPE:
            raise WorldError(
                Code.UNIMPLEMENTED,
                f"extension {name[:_LONGEST_NAME]!r} is not known here; {PROPERTIES_TYPE} is",
            )
        request = parse(properties.PropertyRequest, extension.value)
        payload: dict[str, Any]
        match request.WhichOneof("payload"):
            case "read_property":
                key = request.read_property.key
                payload = {"read_property": {"value": self.read([key], member)[key]}}
            case "write_property":
                written = request.write_property
                self.write({written.key: written.value}, member)
                payload = {"write_property": {}}
            case "list_property":
                listed = self.list([request.list_property.key], member)
                payload = {"list_property": {"values": list(map(_extension_entry, listed))}}
            case _:
                reason = "a PropertyRequest without a payload"
                raise WorldError(Code.INVALID_ARGUMENT, reason)
        packed = any_pb2.Any()
        packed.Pack(properties.PropertyResponse(**payload))
        return bytes(pb.EnvironmentResponse(extension=packed).SerializeToString())

    def answer_core(self, request: Any, member: Membership | None) -> bytes:
        """Return the response to an EnvironmentRequest without a payload of today's schema."""
        unknown: Any = UnknownFieldSet(request)  # its type stubs lack the iteration
        for found in unknown:
            number, data = found.field_number, found.data
            if number not in (_READ, _WRITE, _LIST) or not isinstance(data, bytes):
                continue
            message = b""
            if number == _READ:
                values = self.read(_keys(data), member)
                message = pb.CreateWorldRequest(settings=values).SerializeToString()
            elif number == _WRITE:
                self.write(parse(pb.CreateWorldRequest, data).settings, member)
            else:
                message = b"".join(map(_core_entry, self.list(_keys(data), member)))
            tag = bytes((number << 3 | 2,))
            # An empty message shows its kind, too.
            return field(tag, message) or tag + b"\x00"
        raise WorldError(
            Code.INVALID_ARGUMENT, "an EnvironmentRequest without a payload that is known here"
        )

    def read(self, keys: Iterable[str], member: Membership | None) -> dict[str, Any]:
        """Return the values, ``pb.Tensor`` by key; all keys are read, or none.

        Raises:
            WorldError: There is no such property, or it can only be written.
        """
        known = self._by_key(member)
        values = {}
        for key in dict.fromkeys(keys):
            found = _known(key, known)
            if found.read is None:
                reason = f"property {key!r} can only be written"
                raise WorldError(Code.PERMISSION_DENIED, reason)
            values[key] = pack_tensor(found.read())
        return values

    def write(self, values: Mapping[str, Any], member: Membership | None) -> None:
        """Write ``pb.Tensor`` by key; the keys before one that is refused have been written.

        Raises:
            CodecError: A value is not accepted.
            WorldError: There is no such property, or it can only be read.
        """
        known = self._by_key(member)
        for key in values:
            found = _known(key, known)
            if found.write is None:
                raise WorldError(Code.PERMISSION_DENIED, f"property {key!r} can only be read")
            found.write(plain_setting(f"property {key!r}", values[key]))

    def list(self, keys: Iterable[str], member: Membership | None) -> list[Property]:
        """Return the properties and nodes directly below each key; an empty one is the root.

        Raises:
            WorldError: There is nothing below one of them.
        """
        known = self._by_key(member).values()
        nodes = {each.key for each in known if each.dtype is DataType.INVALID}
        entries = []
        for parent in dict.fromkeys(keys):
            if parent and parent not in nodes:
                reason = f"there is nothing below property {parent[:_LONGEST_QUOTE]!r}"
                raise WorldError(Code.NOT_FOUND, reason)
            below = [each for each in known if each.key.rpartition(".")[0] == parent]
            entries += sorted(below, key=lambda each: each.key not in nodes)
        return entries

    def _by_key(self, member: Membership | None) -> Mapping[str, Property]:
        own = _of_world(*member) if member else ()
        return {each.key: each for each in (*self._universal, *own)}


def _of_world(world: WorldRunner, slot: AgentSlot) -> tuple[Property, ...]:
    return (
        Property(WORLD, DataType.INVALID, "the joined world"),
        Property(f"{WORLD}.name", DataType.STRING, "for JoinWorld", lambda: world.name),
        Property(
            f"{WORLD}.missing_actions",
            DataType.STRING,
            "what stands for actions that an agent does not send, a setting of CreateWorld: hold, "
            "default or error",
            lambda: world.missing_actions.value,
        ),
        Property(
            f"{WORLD}.seed",
            DataType.INT64,
            "of this agent's next sequence",
            None,
            lambda value: world.set_next_reset(slot, ResetOptions(as_seed(value, f"{WORLD}.seed"))),
        ),
    )


def _known(key: str, known: Mapping[str, Property]) -> Property:
    found = known.get(key)
    if found is None or found.dtype is DataType.INVALID:
        some = ", ".join(key for key, one in known.items() if one.dtype is not DataType.INVALID)
        raise WorldError(
            Code.NOT_FOUND, f"there is no property {key[:_LONGEST_QUOTE]!r}; there are {some}"
        )
    return found


def _keys(data: bytes) -> tuple[str, ...]:
    return tuple(parse(pb.Tensor.StringArray, data).array)


def _extension_entry(entry: Property) -> Any:
    is_readable, is_writable, is_listable = entry.flags()
    return properties.PropertySpec(
        spec=entry.spec(),
        is_readable=is_readable,
        is_writable=is_writable,
        is_listable=is_listable,
        description=entry.description,
    )


def _core_entry(entry: Property) -> bytes:
    flag_fields = b"".join(
        bytes((tag, 1)) for tag, flag in zip(b"\x08\x10\x18", entry.flags(), strict=True) if flag
    )
    spec = field(b"\x22", entry.spec().SerializeToString())
    key = field(b"\x0a", entry.key.encode())
    return field(b"\x0a", key + field(b"\x12", flag_fields + spec))
