"""Moves of a fleet's endpoints: each at most once, to the node of the first runner that wants it.

Another actor with the endpoint's id starts on that node, and its former actor ends.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.compat.ray import free_resources
from rlmesh_ray.errors import RlmeshError

_MOVE_TIMEOUT_S = 20.0
_FULL_FOR_S = 60.0
"""Pause before another attempt to move an endpoint to a node that had no room."""
_NEEDS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""Resources that a movable endpoint may need: Ray's option, and Ray's name of the resource."""


@dataclass(frozen=True, slots=True)
class EndpointSpec:
    """The arguments with which one endpoint starts."""

    endpoint_id: str
    options: Mapping[str, Any]
    """Ray's options of its actor."""
    token: str = field(repr=False)
    address: str | None = None
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


class EndpointMover:
    """Moves endpoints to nodes that have room for them.

    Args:
        start: Starts another actor of an endpoint, which does not announce itself, with changes of
            Ray's options.
        is_kept: Whether an endpoint, by id, is neither retiring nor ended.
    """

    def __init__(
        self,
        start: Callable[[EndpointSpec, Mapping[str, Any]], Any],
        is_kept: Callable[[str], bool],
    ) -> None:
        self._start = start
        self._is_kept = is_kept
        self._full_until_s: dict[str, float] = {}

    async def move_near(self, endpoint: ManagedEndpoint, node_id: str) -> None:
        """Move an endpoint to a node, if it has never been asked for and the node has room.

        Returns when the endpoint serves at its final place.
        """
        if endpoint.is_placed or not endpoint.spec.is_movable:
            return
        async with endpoint.moving:
            if not endpoint.is_placed:
                await self._move_to(endpoint, node_id)
                endpoint.is_placed = True

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
            actor = self._start(endpoint.spec, changes)
            async with asyncio.timeout(_MOVE_TIMEOUT_S):
                description = await actor.describe.remote()
            if description["node_id"] == node_id and self._is_kept(endpoint.spec.endpoint_id):
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
        """Return whether an endpoint may fit on a node, by what Ray knows now."""
        if time.monotonic() < self._full_until_s.get(node_id, 0.0):
            return False
        free = free_resources(node_id)
        needs = {name: options.get(option) or 0 for option, name in _NEEDS.items()}
        return all(free.get(name, 0.0) >= amount for name, amount in needs.items())
