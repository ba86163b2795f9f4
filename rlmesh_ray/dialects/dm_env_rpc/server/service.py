"""gRPC service of dm_env_rpc, ``dm_env_rpc.v1.Environment``, on the endpoint of an environment."""

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from rlmesh_ray.dialects.dm_env_rpc.protocol import Code, WorldError
from rlmesh_ray.dialects.dm_env_rpc.server.properties import Membership, Properties
from rlmesh_ray.dialects.dm_env_rpc.server.settings import (
    create_settings,
    join_settings,
    reset_settings,
)
from rlmesh_ray.dialects.dm_env_rpc.server.worlds import WorldRegistry, WorldRunner
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import AgentSlot, agent_names
from rlmesh_ray.dialects.dm_env_rpc.wire.tensors import (
    MAX_SETTINGS_BYTES,
    error_details,
    pb,
    status,
)
from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.server.endpoint.calls import IdleTimeout, PrependedStream, first_message
from rlmesh_ray.server.endpoint.gate import Drain
from rlmesh_ray.server.env.env_service import MakeDialectService
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import leaves
from rlmesh_ray.wire.protobuf import as_utf8, parse
from rlmesh_ray.wire.rlmesh_v1.limits import MAX_MESSAGE_BYTES

_LOG = logging.getLogger(__name__)

SERVICE = "dm_env_rpc.v1.Environment"
_STOPPING = "the endpoint is stopping"
_LONGEST_INTEGER_BYTES = 10


class EnvironmentService:
    """Answers the service's one call, Process; for its arguments see ``EnvService``."""

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        drain: Drain,
        idle_timeout_s: float | None = None,
    ) -> None:
        self._contract = contract
        self._worlds = WorldRegistry(pool, contract)
        self._properties = Properties(contract)
        self._drain = drain
        self._idle_timeout_s = idle_timeout_s

    @property
    def max_request_bytes(self) -> int:
        """Size of the largest request that a client can have a use for, 10 bytes an integer."""
        contract = self._contract
        num_elements = sum(
            math.prod(leaf.shape)
            for leaf in leaves(contract.action_space)
            if leaf.dtype is not None
        )
        wanted = contract.num_envs * num_elements * _LONGEST_INTEGER_BYTES + MAX_SETTINGS_BYTES
        return min(wanted, MAX_MESSAGE_BYTES)

    @property
    def streams_per_session(self) -> int:
        return self._contract.num_envs * max(1, len(agent_names(self._contract)))

    def handlers(self) -> grpc.GenericRpcHandler:
        process = grpc.stream_stream_rpc_method_handler(self.process)
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def process(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        await context.send_initial_metadata(())
        first = await first_message(requests, context)
        if first is None:
            return
        idle_timeout = IdleTimeout(self._idle_timeout_s)
        stream = ProcessStream(self._worlds, self._properties)
        try:
            async for data in idle_timeout.watch(PrependedStream(first, requests)):
                self._drain.begin_request()
                try:
                    await context.write(await stream.answer(data))
                finally:
                    self._drain.end_request()
                if self._drain.is_draining:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await idle_timeout.abort_if_expired(context)
        finally:
            idle_timeout.stop()
            stream.end()


ENV_SERVICE: MakeDialectService = EnvironmentService


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

    async def answer(self, data: bytes) -> bytes:
        try:
            request = parse(pb.EnvironmentRequest, data)
            kind = request.WhichOneof("payload")
            if kind is None:
                return self._properties.answer_core(request, self._member)
            return await _HANDLERS[kind](self, request)
        except WorldError as error:
            return pack_error(error)
        except CodecError as error:
            return pack_error(WorldError(Code.INVALID_ARGUMENT, str(error)))
        except Exception as error:  # noqa: BLE001  # outermost frame: the stream goes on
            _LOG.exception("a dm_env_rpc request has failed")
            return pack_error(WorldError(Code.INTERNAL, f"the endpoint failed: {error!r}"))

    def end(self) -> None:
        """Leave, and end the worlds without agents that this stream has created. Idempotent."""
        self._leave_world()
        self._worlds.release_worlds(self)

    async def _create(self, request: Any) -> bytes:
        settings = create_settings(request.create_world.settings)
        world = await self._worlds.create(settings, self)
        return _packed(create_world={"world_name": world.name})

    async def _join(self, request: Any) -> bytes:
        if self._member is not None:
            raise WorldError(
                Code.FAILED_PRECONDITION,
                "this stream has joined a world already; send LeaveWorld first, or open another "
                "stream",
            )
        join = request.join_world
        self._member = await self._worlds.join(join.world_name, join_settings(join.settings))
        return _packed(join_world={"specs": self._member[1].specs})

    async def _step(self, request: Any) -> bytes:
        world, slot = self._joined()
        return await world.step(slot, request.step)

    async def _reset(self, request: Any) -> bytes:
        world, slot = self._joined()
        world.reset(slot, reset_settings(request.reset.settings, is_batched=slot.is_batched))
        return _packed(reset={"specs": slot.specs})

    async def _reset_world(self, request: Any) -> bytes:
        name, settings = request.reset_world.world_name, request.reset_world.settings
        world, caller = self._own_or_named(name)
        await world.reset_world(caller, reset_settings(settings))
        return _packed(reset_world={})

    async def _leave(self, _: Any) -> bytes:
        self._leave_world()
        return _packed(leave_world={})

    async def _destroy(self, request: Any) -> bytes:
        name = request.destroy_world.world_name
        _, caller = self._own_or_named(name)
        if caller is not None:
            raise WorldError(
                Code.FAILED_PRECONDITION,
                "this stream is joined to that world; send LeaveWorld before DestroyWorld",
            )
        self._worlds.destroy(name)
        return _packed(destroy_world={})

    async def _extension(self, request: Any) -> bytes:
        return self._properties.answer_extension(request.extension, self._member)

    def _leave_world(self) -> None:
        # Without a world it has no effect.
        if self._member is not None:
            member, self._member = self._member, None
            self._worlds.leave(*member)

    def _joined(self) -> Membership:
        if self._member is None:
            raise WorldError(
                Code.FAILED_PRECONDITION,
                "this stream has not joined a world; send JoinWorld first",
            )
        return self._member

    def _own_or_named(self, name: str) -> tuple[WorldRunner, AgentSlot | None]:
        """Return a world, and the stream's slot in it; no name means the joined one."""
        if self._member is not None and name in ("", self._member[0].name):
            return self._member
        return self._worlds.find(name), None


# By the payload of a request. Core messages for properties have none, see ``Properties``.
_HANDLERS: Mapping[str, Callable[[ProcessStream, Any], Awaitable[bytes]]] = {
    "create_world": ProcessStream._create,
    "join_world": ProcessStream._join,
    "step": ProcessStream._step,
    "reset": ProcessStream._reset,
    "reset_world": ProcessStream._reset_world,
    "leave_world": ProcessStream._leave,
    "destroy_world": ProcessStream._destroy,
    "extension": ProcessStream._extension,
}


def pack_error(error: WorldError) -> bytes:
    found = status.Status(code=int(error.code), message=as_utf8(error.message))
    if error.debug_info:
        found.details.add().Pack(error_details.DebugInfo(detail=as_utf8(error.debug_info)))
    return _packed(error=found)


def _packed(**payload: Any) -> bytes:
    return bytes(pb.EnvironmentResponse(**payload).SerializeToString())
