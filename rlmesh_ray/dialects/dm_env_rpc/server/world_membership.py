"""Worlds of an endpoint, by name: their creation, joins and ends.

A world belongs to the stream that created it, and lasts until that stream has ended and its last
agent has left. So a matchmaker keeps its stream open until the agents have joined.
"""

from rlmesh_ray.dialects.dm_env_rpc.protocol.messages import Code, WorldError
from rlmesh_ray.dialects.dm_env_rpc.server.settings import CreateSettings, JoinSettings
from rlmesh_ray.dialects.dm_env_rpc.server.world_runner import WorldRunner
from rlmesh_ray.dialects.dm_env_rpc.wire.agent_tensors import AgentSlot, agent_slots, all_lanes
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract


class WorldRegistry:
    """Creates, finds and ends worlds. For the serving loop.

    Args:
        pool: Started; starts the workers of worlds. A world counts as a session.
        contract: The endpoint's.
        grace_s: As for ``WorldRunner``.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract, grace_s: float) -> None:
        self._pool = pool
        self.contract = contract
        self._grace_s = grace_s
        self._slots = agent_slots(contract)
        self._worlds: dict[str, WorldRunner] = {}
        self._is_shared = any(slot.agent for slot in self._slots)

    async def create(self, settings: CreateSettings, owner: object) -> WorldRunner:
        """Create a world.

        Args:
            settings: The creator's.
            owner: The creator's stream; None: the endpoint itself.

        Raises:
            CodecError: The settings do not fit the environment.
            WorldError: The endpoint is full, or its environment resets within the step.
        """
        if self.contract.autoreset_mode is AutoresetMode.SAME_STEP:
            raise WorldError(
                Code.UNIMPLEMENTED,
                "this environment resets its lanes within the step that ends an episode (autoreset "
                "mode SAME_STEP), which dm_env_rpc has no form for: serve it with NEXT_STEP or "
                "DISABLED",
            )
        settings.reset_options.check(self.contract.num_envs)
        try:
            await self._pool.reserve()
        except CapacityError as error:
            raise WorldError(Code.RESOURCE_EXHAUSTED, error.message) from error
        world = WorldRunner(self._pool, self.contract, self._slots, settings, self._grace_s, owner)
        self._worlds[world.name] = world
        return world

    def find(self, name: str) -> WorldRunner:
        """Return the world with a name.

        Raises:
            WorldError: There is none.
        """
        world = self._worlds.get(name)
        if world is None:
            reason = f"there is no world {name[:80]!r}; CreateWorld names one"
            raise WorldError(Code.NOT_FOUND, reason)
        return world

    async def join(self, name: str, settings: JoinSettings) -> tuple[WorldRunner, AgentSlot]:
        """Add an agent to a world; return the world and its slot.

        Args:
            name: The world's; empty: one that the endpoint creates and several agents share.
            settings: The agent's.

        Raises:
            WorldError: There is no such world, or no free slot that the settings allow.
        """
        world = self.find(name) if name else await self._own_world(settings)
        try:
            slot = self._chosen(world, settings)
        except WorldError:
            if not name:
                self._reap(world.name)
            raise
        world.take(slot)
        return world, slot

    def leave(self, world: WorldRunner, slot: AgentSlot) -> None:
        if world.name in self._worlds:
            world.leave(slot)
            self._reap(world.name)

    def destroy(self, name: str) -> None:
        """End a world without agents.

        Raises:
            WorldError: There is no such world, or it has agents.
        """
        if not self.find(name).is_empty:
            raise WorldError(
                Code.FAILED_PRECONDITION,
                "an agent is still joined to this world; have all agents leave first",
            )
        self._worlds.pop(name).end()

    def release_worlds(self, owner: object) -> None:
        """End the worlds of a stream that has ended; those with agents end with the last agent."""
        for world in [world for world in self._worlds.values() if world.owner is owner]:
            world.owner = None
            self._reap(world.name)

    def _reap(self, name: str) -> None:
        world = self._worlds.get(name)
        if world is not None and world.owner is None and world.is_empty:
            self._worlds.pop(name).end()

    async def _own_world(self, settings: JoinSettings) -> WorldRunner:
        if self._is_shared and not settings.is_batched:
            for world in self._worlds.values():
                if world.is_open and self._free_slots(world, settings):
                    return world
        return await self.create(CreateSettings(), None)

    def _free_slots(self, world: WorldRunner, settings: JoinSettings) -> list[AgentSlot]:
        free = world.free_slots()
        return [slot for slot in self._suited(settings) if slot in free]

    def _suited(self, settings: JoinSettings) -> list[AgentSlot]:
        return [
            slot
            for slot in self._slots
            if settings.lane in (None, slot.lane) and settings.agent in (None, slot.agent)
        ]

    def _chosen(self, world: WorldRunner, settings: JoinSettings) -> AgentSlot:
        if settings.is_batched:
            return self._batched(world, settings)
        if not self._suited(settings):
            agents = list(dict.fromkeys(slot.agent for slot in self._slots if slot.agent))
            about = (
                f" and the agents {agents}" if agents else ", each with one agent without a name"
            )
            raise WorldError(
                Code.INVALID_ARGUMENT,
                f"there is no slot with lane {settings.lane} and agent {settings.agent!r}; this "
                f"environment has {self.contract.num_envs} lane(s){about}",
            )
        free = self._free_slots(world, settings)
        if not free:
            raise WorldError(
                Code.RESOURCE_EXHAUSTED,
                "this world has no free slot of that kind; create another, or wait until an agent "
                "leaves",
            )
        return free[0]

    def _batched(self, world: WorldRunner, settings: JoinSettings) -> AgentSlot:
        if settings.lane is not None or settings.agent is not None:
            reason = "a batched join drives all lanes; give neither 'lane' nor 'agent'"
            raise WorldError(Code.INVALID_ARGUMENT, reason)
        if self.contract.autoreset_mode is AutoresetMode.DISABLED and self.contract.num_envs > 1:
            raise WorldError(
                Code.UNIMPLEMENTED,
                "lanes that do not reset themselves cannot be driven by one batched join; serve "
                "the environment with autoreset mode NEXT_STEP, or join lane by lane",
            )
        if not world.is_empty:
            reason = "a batched join needs a world for itself; create another"
            raise WorldError(Code.FAILED_PRECONDITION, reason)
        return all_lanes(self.contract)
