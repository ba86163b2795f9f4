"""The properties of an endpoint, and of the world that a stream has joined."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmesh_ray import __version__
from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import (
    Code,
    ErrorResponse,
    ListProperties,
    ReadProperties,
    WriteProperties,
)
from rlmesh_ray.dialects.dm_env_rpc.server.agent_slots import AgentSlot
from rlmesh_ray.dialects.dm_env_rpc.server.settings import ResetOptions, as_seed
from rlmesh_ray.dialects.dm_env_rpc.server.world_runner import WorldRunner
from rlmesh_ray.dialects.dm_env_rpc.wire.responses import (
    PropertyEntry,
    pack_error,
    pack_listed,
    pack_read,
    pack_written,
)
from rlmesh_ray.dialects.dm_env_rpc.wire.settings import plain_setting
from rlmesh_ray.dialects.dm_env_rpc.wire.specs import CONTRACT, TensorSpec, contract_to_text
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import DataType, pack_tensor
from rlmesh_ray.spaces.contract import EnvContract

Membership = tuple[WorldRunner, AgentSlot]
ROOT = "rlmesh"
WORLD = "rlmesh.world"
_LONGEST_QUOTE = 80


@dataclass(frozen=True, slots=True)
class Property:
    """A property with a value."""

    key: str
    dtype: DataType
    description: str
    read: Callable[[], object] | None = None
    write: Callable[[object], None] | None = None
    """Raises CodecError for a value that it does not accept."""

    def entry(self) -> PropertyEntry:
        """Return its entry in a list of properties."""
        return PropertyEntry(
            TensorSpec(self.key, self.dtype),
            self.description,
            is_readable=self.read is not None,
            is_writable=self.write is not None,
        )


class Properties:
    """Answers requests for properties.

    Args:
        contract: The endpoint's.
    """

    def __init__(self, contract: EnvContract) -> None:
        text = contract_to_text(contract)
        self._universal = (
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

    def read(self, request: ReadProperties, member: Membership | None) -> bytes:
        """Return the response; all keys are read, or none."""
        known = self._by_key(member)
        values = {}
        for key in dict.fromkeys(request.keys):
            found = known.get(key)
            if found is None:
                return pack_error(_unknown(key, known))
            if found.read is None:
                reason = f"property {key!r} can only be written"
                return pack_error(ErrorResponse(Code.PERMISSION_DENIED, reason))
            values[key] = pack_tensor(found.read())
        return pack_read(values, is_core=request.is_core)

    def write(self, request: WriteProperties, member: Membership | None) -> bytes:
        """Return the response; the keys before one that is refused have been written."""
        known = self._by_key(member)
        for key in request.values:
            found = known.get(key)
            if found is None:
                return pack_error(_unknown(key, known))
            if found.write is None:
                reason = f"property {key!r} can only be read"
                return pack_error(ErrorResponse(Code.PERMISSION_DENIED, reason))
            found.write(plain_setting(f"property {key!r}", request.values[key]))
        return pack_written(is_core=request.is_core)

    def list(self, request: ListProperties, member: Membership | None) -> bytes:
        """Return the response: the properties and nodes directly below each key."""
        known = self._by_key(member)
        nodes = {ROOT: "this endpoint"} | ({WORLD: "the joined world"} if member else {})
        entries = {}
        for parent in dict.fromkeys(request.keys):
            if parent and parent not in nodes:
                reason = f"there is nothing below property {parent[:_LONGEST_QUOTE]!r}"
                return pack_error(ErrorResponse(Code.NOT_FOUND, reason))
            for key, text in nodes.items():
                if _parent(key) == parent:
                    spec = TensorSpec(key, DataType.INVALID)
                    entries[key] = PropertyEntry(spec, text, is_listable=True)
            for key, found in known.items():
                if _parent(key) == parent:
                    entries[key] = found.entry()
        return pack_listed(list(entries.values()), is_core=request.is_core)

    def _by_key(self, member: Membership | None) -> Mapping[str, Property]:
        own = _of_world(*member) if member else ()
        return {each.key: each for each in (*self._universal, *own)}


def _of_world(world: WorldRunner, slot: AgentSlot) -> tuple[Property, ...]:
    return (
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


def _unknown(key: str, known: Mapping[str, Any]) -> ErrorResponse:
    some = ", ".join(known)
    return ErrorResponse(
        Code.NOT_FOUND, f"there is no property {key[:_LONGEST_QUOTE]!r}; there are {some}"
    )


def _parent(key: str) -> str:
    return key.rpartition(".")[0]
