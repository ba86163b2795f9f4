"""One dm_env_rpc stream: every request gets its response, in order."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.world_messages import (
    Code,
    CreateWorld,
    DestroyWorld,
    JoinWorld,
    LeaveWorld,
    ListProperties,
    ReadProperties,
    Refusal,
    ResetAgent,
    ResetWorld,
    StepWorld,
    UnreadableRequest,
    WriteProperties,
)
from rlmesh_ray.protocol.world_stream import objection
from rlmesh_ray.server.dm_env_rpc.hosted_world import HostedWorld
from rlmesh_ray.server.dm_env_rpc.properties import Membership, Properties
from rlmesh_ray.server.dm_env_rpc.settings import (
    create_settings,
    join_settings,
    reset_settings,
)
from rlmesh_ray.server.dm_env_rpc.worlds import Worlds
from rlmesh_ray.wire.dm_env_rpc_v1.requests import parse_request
from rlmesh_ray.wire.dm_env_rpc_v1.responses import (
    DESTROYED_WORLD,
    LEFT_WORLD,
    RESET_WORLD,
    pack_created,
    pack_joined,
    pack_refusal,
    pack_reset,
)

_JOINED_TO_IT = Refusal(
    Code.FAILED_PRECONDITION,
    "this stream is joined to that world; send LeaveWorld before DestroyWorld",
)


class Conversation:
    """The state of a stream: which world it has joined.

    Args:
        worlds: Of the endpoint.
        properties: Of the endpoint.
    """

    def __init__(self, worlds: Worlds, properties: Properties) -> None:
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
            UnreadableRequest: self._refuse,
        }

    async def answer(self, data: bytes) -> bytes:
        """Return the response to a request."""
        request = parse_request(data)
        refusal = objection(request, is_joined=self._member is not None)
        if refusal is not None:
            return pack_refusal(refusal)
        try:
            if self._member is not None and isinstance(request, StepWorld):
                world, seat = self._member
                return await world.step(seat, request)
            return await self._handlers[type(request)](request)
        except CodecError as error:
            return pack_refusal(Refusal(Code.INVALID_ARGUMENT, str(error)))

    def end(self) -> None:
        """Leave, and end the worlds that this stream has created and nobody needs. Idempotent."""
        if self._member is not None:
            member, self._member = self._member, None
            self._worlds.leave(*member)
        self._worlds.disown(self)

    async def _create(self, request: CreateWorld) -> bytes:
        world = await self._worlds.create(create_settings(request.settings), self)
        return pack_refusal(world) if isinstance(world, Refusal) else pack_created(world.name)

    async def _join(self, request: JoinWorld) -> bytes:
        joined = await self._worlds.join(request.world_name, join_settings(request.settings))
        if isinstance(joined, Refusal):
            return pack_refusal(joined)
        self._member = joined
        return pack_joined(joined[1].tensors.specs)

    async def _reset(self, request: ResetAgent) -> bytes:
        world, seat = self._joined()
        world.reset(seat, reset_settings(request.settings, is_batched=seat.is_batched))
        return pack_reset(seat.tensors.specs)

    async def _reset_world(self, request: ResetWorld) -> bytes:
        world, caller = self._own_or_named(request.world_name)
        if isinstance(world, Refusal):
            return pack_refusal(world)
        refusal = await world.reset_world(caller, reset_settings(request.settings))
        return RESET_WORLD if refusal is None else pack_refusal(refusal)

    async def _leave(self, _: LeaveWorld) -> bytes:
        if self._member is not None:
            member, self._member = self._member, None
            self._worlds.leave(*member)
        return LEFT_WORLD

    async def _destroy(self, request: DestroyWorld) -> bytes:
        _, caller = self._own_or_named(request.world_name)
        refusal = _JOINED_TO_IT if caller else self._worlds.destroy(request.world_name)
        return DESTROYED_WORLD if refusal is None else pack_refusal(refusal)

    async def _read(self, request: ReadProperties) -> bytes:
        return self._properties.read(request, self._member)

    async def _write(self, request: WriteProperties) -> bytes:
        return self._properties.write(request, self._member)

    async def _list(self, request: ListProperties) -> bytes:
        return self._properties.list(request, self._member)

    async def _refuse(self, request: UnreadableRequest) -> bytes:
        return pack_refusal(request.refusal)

    def _joined(self) -> Membership:
        assert self._member is not None, "refused without"
        return self._member

    def _own_or_named(self, name: str) -> "tuple[HostedWorld | Refusal, Any]":
        """Return a world, and the stream's seat there, if it has one; no name means its own."""
        if self._member is not None and name in ("", self._member[0].name):
            return self._member
        return self._worlds.find(name), None
