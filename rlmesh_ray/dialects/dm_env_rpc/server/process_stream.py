"""Requests and responses of one Process stream."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

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
    WriteProperties,
)
from rlmesh_ray.dialects.dm_env_rpc.protocol.stream_rules import permission_error
from rlmesh_ray.dialects.dm_env_rpc.server.properties import Membership, Properties
from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    create_settings,
    join_settings,
    reset_settings,
)
from rlmesh_ray.dialects.dm_env_rpc.server.world_membership import WorldRegistry
from rlmesh_ray.dialects.dm_env_rpc.server.world_runner import WorldRunner
from rlmesh_ray.dialects.dm_env_rpc.wire.requests import parse_request
from rlmesh_ray.dialects.dm_env_rpc.wire.responses import (
    DESTROYED_WORLD,
    LEFT_WORLD,
    RESET_WORLD,
    pack_created,
    pack_error,
    pack_joined,
    pack_reset,
)
from rlmesh_ray.errors import CodecError

_JOINED_TO_IT = ErrorResponse(
    Code.FAILED_PRECONDITION,
    "this stream is joined to that world; send LeaveWorld before DestroyWorld",
)


class ProcessStream:
    """One stream, and its membership in a world.

    Args:
        worlds: The endpoint's worlds.
        properties: The endpoint's properties.
    """

    def __init__(self, worlds: WorldRegistry, properties: Properties) -> None:
        self._worlds = worlds
        self._properties = properties
        self._member: Membership | None = None
        self._handlers: Mapping[type, Callable[[Any], Awaitable[bytes]]] = {
            CreateWorld: self._create,
            JoinWorld: self._join,
            ResetAgent: self._reset,
            ResetWorld: self._reset_world,
            LeaveWorld: self._leave,
            DestroyWorld: self._destroy,
            ReadProperties: self._read,
            WriteProperties: self._write,
            ListProperties: self._list,
            MalformedWorldRequest: self._refuse,
        }

    async def answer(self, data: bytes) -> bytes:
        """Return the response to a request."""
        request = parse_request(data)
        refusal = permission_error(request, is_joined=self._member is not None)
        if refusal is not None:
            return pack_error(refusal)
        try:
            if self._member is not None and isinstance(request, StepWorld):
                world, slot = self._member
                return await world.step(slot, request)
            return await self._handlers[type(request)](request)
        except CodecError as error:
            return pack_error(ErrorResponse(Code.INVALID_ARGUMENT, str(error)))

    def end(self) -> None:
        """Leave, and end the worlds without agents that this stream has created. Idempotent."""
        if self._member is not None:
            member, self._member = self._member, None
            self._worlds.leave(*member)
        self._worlds.release_worlds(self)

    async def _create(self, request: CreateWorld) -> bytes:
        world = await self._worlds.create(create_settings(request.settings), self)
        return pack_error(world) if isinstance(world, ErrorResponse) else pack_created(world.name)

    async def _join(self, request: JoinWorld) -> bytes:
        joined = await self._worlds.join(request.world_name, join_settings(request.settings))
        if isinstance(joined, ErrorResponse):
            return pack_error(joined)
        self._member = joined
        return pack_joined(joined[1].tensors.specs)

    async def _reset(self, request: ResetAgent) -> bytes:
        world, slot = self._joined()
        world.reset(slot, reset_settings(request.settings, is_batched=slot.is_batched))
        return pack_reset(slot.tensors.specs)

    async def _reset_world(self, request: ResetWorld) -> bytes:
        world, caller = self._own_or_named(request.world_name)
        if isinstance(world, ErrorResponse):
            return pack_error(world)
        refusal = await world.reset_world(caller, reset_settings(request.settings))
        return RESET_WORLD if refusal is None else pack_error(refusal)

    async def _leave(self, _: LeaveWorld) -> bytes:
        if self._member is not None:
            member, self._member = self._member, None
            self._worlds.leave(*member)
        return LEFT_WORLD

    async def _destroy(self, request: DestroyWorld) -> bytes:
        _, caller = self._own_or_named(request.world_name)
        refusal = _JOINED_TO_IT if caller else self._worlds.destroy(request.world_name)
        return DESTROYED_WORLD if refusal is None else pack_error(refusal)

    async def _read(self, request: ReadProperties) -> bytes:
        return self._properties.read(request, self._member)

    async def _write(self, request: WriteProperties) -> bytes:
        return self._properties.write(request, self._member)

    async def _list(self, request: ListProperties) -> bytes:
        return self._properties.list(request, self._member)

    async def _refuse(self, request: MalformedWorldRequest) -> bytes:
        return pack_error(request.refusal)

    def _joined(self) -> Membership:
        assert self._member is not None, "refused without"
        return self._member

    def _own_or_named(self, name: str) -> "tuple[WorldRunner | ErrorResponse, Any]":
        """Return a world, and the stream's slot in it or None; no name means the joined one."""
        if self._member is not None and name in ("", self._member[0].name):
            return self._member
        return self._worlds.find(name), None
