"""EndpointOwner: the actor that owns the endpoints of one fleet.

The process that starts an actor owns it, and Ray ends the actor with its owner. Endpoints are moved
at the request of a runner, so their owner cannot be the driver; the manager ends with the driver.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.cluster_resources import fits, needs_of
from rlmesh_ray.actors.env_actor import EnvServiceActor, SerializedEnv
from rlmesh_ray.actors.ray_calls import MAX_INLINE_BYTES
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.compat.ray import free_resources
from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions

_MOVE_TIMEOUT_S = 20.0
_FULL_FOR_S = 60.0
"""Pause before another attempt to move an endpoint to a node that had no room."""


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """The arguments with which one endpoint starts."""

    endpoint_id: str
    options: Mapping[str, Any]
    """Ray's options of its actor."""
    token: str = field(repr=False)
    address: ListenOptions = field(default_factory=ListenOptions)
    is_movable: bool = False
    """Whether it moves to the node of the first runner that opens a session with it."""


@dataclass(slots=True)
class ManagedEndpoint:
    """An endpoint and its present actor."""

    spec: EndpointSpec
    actor: Any
    is_placed: bool = False
    """Whether a runner has opened a session with it: it is never moved again."""
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)


_DRAIN_GRACE_S = 5.0


class EndpointOwner:
    """Starts, moves and ends a fleet's endpoints. It does not wait until they serve.

    Args:
        fleet: Id of the fleet.
        env: The environment of all endpoints, and the options that they share.
    """

    def __init__(self, fleet: str, env: SerializedEnv) -> None:
        self._fleet = fleet
        # Kept for the endpoints' restarts; see ``durable``.
        self._env = env if len(env.content) < MAX_INLINE_BYTES else ray.put(env)
        self._registry = shared_registry()
        self._endpoints: dict[str, ManagedEndpoint] = {}
        self._leaving: dict[str, ManagedEndpoint] = {}
        self._draining: set[asyncio.Task[None]] = set()
        self._full_until_s: dict[str, float] = {}
        """Until when no endpoint is moved to a node."""
        # Calls to an asynchronous actor may overtake each other: ``end`` may come before ``start``.
        self._ended: set[str] = set()

    async def start(self, specs: Sequence[EndpointSpec]) -> list[Any]:
        """Start endpoints, but for those already ended; return their actors' handles at once."""
        starting = [spec for spec in specs if spec.endpoint_id not in self._ended]
        for spec in starting:
            self._endpoints[spec.endpoint_id] = ManagedEndpoint(spec, self._actor(spec, {}))
        return [self._endpoints[spec.endpoint_id].actor for spec in starting]

    async def actors(self, endpoint_ids: Sequence[str]) -> list[Any]:
        return [self._endpoints[each].actor for each in endpoint_ids if each in self._endpoints]

    async def token(self, endpoint_id: str) -> str | None:
        """Return the token of an endpoint, for programs of the cluster that observe it."""
        endpoint = (self._endpoints | self._leaving).get(endpoint_id)
        return None if endpoint is None else endpoint.spec.token

    async def move_near(self, endpoint_id: str, node_id: str) -> None:
        """Move an endpoint to a node, if no runner has asked for it before and the node has room.

        Returns when the endpoint serves at its final place.
        """
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None or endpoint.is_placed or not endpoint.spec.is_movable:
            return
        async with endpoint.moving:
            if not endpoint.is_placed:
                await self._move_to(endpoint, node_id)
                endpoint.is_placed = True

    async def retire(self, endpoint_ids: Iterable[str], timeout_s: float) -> None:
        """Give endpoints no new sessions, and end each one after its last session.

        Args:
            endpoint_ids: Ids of the endpoints.
            timeout_s: After how long sessions that are still open are cut off.
        """
        for endpoint_id in endpoint_ids:
            endpoint = self._endpoints.pop(endpoint_id, None)
            if endpoint is None:
                continue
            self._leaving[endpoint_id] = endpoint
            await self._update_registry("retire", endpoint_id)
            draining = asyncio.create_task(self._drain(endpoint, timeout_s))
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)

    async def end(self, endpoint_ids: Iterable[str] | None = None) -> None:
        """End endpoints at once, also those that ``start`` has yet to start; None: all."""
        known = self._endpoints | self._leaving
        ids = list(known) if endpoint_ids is None else list(endpoint_ids)
        self._ended.update(ids)
        ending = [known[each] for each in ids if each in known]
        # All of them first: the registry may be slow.
        for endpoint in ending:
            ray.kill(endpoint.actor)
        for endpoint in ending:
            await self._end(endpoint)

    def _actor(
        self, spec: EndpointSpec, changes: Mapping[str, Any], *, announces: bool = True
    ) -> Any:
        actor_class: Any = EnvServiceActor
        return actor_class.options(**{**spec.options, **changes}).remote(
            self._env,
            token=spec.token,
            address=spec.address,
            endpoint_id=spec.endpoint_id,
            fleet=self._fleet,
            announces=announces,
        )

    async def _move_to(self, endpoint: ManagedEndpoint, node_id: str) -> None:
        """Start an endpoint on a node and end its former actor; without room it stays."""
        if not self._has_room(node_id, endpoint.spec.options):
            return
        actor = None
        try:
            async with asyncio.timeout(_MOVE_TIMEOUT_S):
                description = await endpoint.actor.describe.remote()
            if description["node_id"] == node_id or description["num_sessions"]:
                return
            # Elsewhere at once if that node is full all the same, or lost later.
            on_node = NodeAffinitySchedulingStrategy(node_id, soft=True, _spill_on_unavailable=True)
            changes = {"scheduling_strategy": on_node}
            actor = self._actor(endpoint.spec, changes, announces=False)
            async with asyncio.timeout(_MOVE_TIMEOUT_S):
                description = await actor.describe.remote()
            if description["node_id"] == node_id and endpoint.spec.endpoint_id in self._endpoints:
                # The new actor counts from here on, even if the call fails: the registry may have
                # its record already, and the former actor would then end itself.
                actor, endpoint.actor = endpoint.actor, actor
                async with asyncio.timeout(_MOVE_TIMEOUT_S):
                    await endpoint.actor.announce.remote()
                return
            self._full_until_s[node_id] = time.monotonic() + _FULL_FOR_S
        except (TimeoutError, RlmeshError, ray.exceptions.RayError):
            self._full_until_s[node_id] = time.monotonic() + _FULL_FOR_S
        finally:
            if actor is not None:  # the one that is not kept
                ray.kill(actor)

    def _has_room(self, node_id: str, options: Mapping[str, Any]) -> bool:
        if time.monotonic() < self._full_until_s.get(node_id, 0.0):
            return False
        return fits(needs_of(options), free_resources(node_id))

    async def _drain(self, endpoint: ManagedEndpoint, timeout_s: float) -> None:
        async with endpoint.moving:  # after a move the new actor is drained
            # Without an answer its sessions are lost, or their time is over.
            with contextlib.suppress(TimeoutError, RlmeshError, ray.exceptions.RayError):
                async with asyncio.timeout(timeout_s + _DRAIN_GRACE_S):
                    await endpoint.actor.drain.remote(timeout_s)
            await self._end(endpoint)

    async def _end(self, endpoint: ManagedEndpoint) -> None:
        endpoint_id = endpoint.spec.endpoint_id
        self._endpoints.pop(endpoint_id, None)
        self._leaving.pop(endpoint_id, None)
        ray.kill(endpoint.actor)
        await self._update_registry("withdraw", endpoint_id)

    async def _update_registry(self, method: str, endpoint_id: str) -> None:
        """Call a method of the registry for an endpoint. Never fails: leases expire anyhow."""
        try:
            await getattr(self._registry, method).remote(endpoint_id)
        except ray.exceptions.RayError:
            # The registry is lost for good; this starts another one, if no endpoint has.
            with contextlib.suppress(ValueError, ray.exceptions.RayError):
                self._registry = shared_registry()
                await getattr(self._registry, method).remote(endpoint_id)


def start_endpoint_owner(fleet: str, env: SerializedEnv) -> Any:
    """Start the manager of a fleet; it lives as long as the handle that this returns."""
    return (
        ray.remote(EndpointOwner)
        .options(
            name=_name(fleet),
            namespace=REGISTRY_NAMESPACE,
            num_cpus=0,
            # The loss of any other node would end the fleet, but not the cluster.
            resources={"node:__internal_head__": 0.001},
            scheduling_strategy="DEFAULT",
        )
        .remote(fleet, env)
    )


def find_endpoint_owner(fleet: str) -> Any:
    """Return the manager of a fleet.

    Raises:
        ValueError: The fleet has been stopped.
    """
    return ray.get_actor(_name(fleet), namespace=REGISTRY_NAMESPACE)


def _name(fleet: str) -> str:
    return f"env-fleet/{fleet}"
