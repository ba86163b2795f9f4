"""EnvFleet: several EnvServiceActors that serve the same environment; and the actor with them."""

import asyncio
import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.env_actor import EnvServiceActor, SerializedEnv
from rlmesh_ray.actors.placement import (
    ON_HEAD,
    ActorOptions,
    Placement,
    await_start,
    checked_addresses,
    fits,
    needs_of,
    require_resources,
)
from rlmesh_ray.actors.ray_calls import StoppedAtExit, durable, get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver, owner_name
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.auth.token_file import derive_token
from rlmesh_ray.compat.ray import free_resources
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.options import completed, require_count, require_seconds, takes_options
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions, listening
from rlmesh_ray.server.env.env_options import DEFAULT_MAX_SESSIONS, EnvOptions

_STOP_TIMEOUT_S = 10.0
_MANAGER_TIMEOUT_S = 30.0  # to request actors from Ray; its own start may take seconds
_LEAVE_TIMEOUT_S = 120.0
_MOVE_TIMEOUT_S = 20.0
_FULL_FOR_S = 60.0
"""Pause before another attempt to move an endpoint to a node that had no room."""
_DRAIN_GRACE_S = 5.0


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


@takes_options(EnvOptions)
class EnvFleet(StoppedAtExit):
    """Endpoints on Ray that serve the same environment, ready when the constructor returns.

    The endpoints live as long as this object or until ``stop``; Ray restarts those that die.
    Make a fleet on the driver, not within a Tune trial, whose resources it would take. Usable
    as a context manager.

    Args:
        env: A Gymnasium id or a factory. An environment that only the endpoints' nodes can import
            is named by an id, ``"module:Env-v0"``; the driver imports nothing of it.
        num_endpoints: Number of endpoints, at least 1; ``scale`` changes it.
        num_cpus: CPUs that Ray reserves for each endpoint.
        num_gpus: GPUs that Ray reserves for each endpoint; a fraction lets endpoints share one.
        addresses: The address of each endpoint, ``HOST:PORT``, one for each, also after a restart,
            such as behind a load balancer. The endpoints are then not moved, and the fleet keeps
            its size. Default: each at its own node's address, at a free port.
        address: ``ListenOptions`` with ``accept_edition_texts`` and ``idle_timeout_s`` of each
            endpoint; the other fields are refused.
        placement: Nodes of the endpoints. ``"near"``: each endpoint is moved once, before its first
            session, to the node of the runner that opens it, if that has room. ``"spread"``: on as
            many nodes as there are. Or ids of nodes (``ray.nodes()[i]["NodeID"]``), used in turn;
            an endpoint whose node is lost restarts elsewhere. ``resources``, ``label_selector`` and
            ``scheduling_strategy`` in ``actor_options`` override "near".
        actor_options: Further options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ..., or a list of such mappings, one for each
            endpoint; the list starts over for endpoints that ``scale`` adds. Of an actor's
            ``runtime_env`` Ray takes ``pip``, ``uv``, ``conda``, ``env_vars`` and archives by URI,
            but no local folders; and the folder of the driver's script comes first on the path.
        start_timeout_s: How long to wait until all endpoints serve, including the setup of their
            ``runtime_env``. Where an autoscaler has to start nodes, that takes minutes. While
            endpoints have no node yet, the log says what they need and what is free.
        **options: Those of ``EnvOptions``, of each endpoint.

    Raises:
        ConfigurationError: ``num_endpoints`` is less than 1, ``start_timeout_s`` is no finite
            number of seconds, ``addresses`` or ``actor_options`` are not one for each,
            ``placement`` names no node, or ``env`` names no environment or cannot be pickled.
        EnvStartError: The environment could not be created, or the ``runtime_env`` not set up.
        CapacityError: The cluster did not place all endpoints in time.
    """

    def __init__(  # where endpoints run; what they serve is in ``options``
        self,
        env: EnvLike,
        *,
        num_endpoints: int = 1,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        addresses: Sequence[str] | None = None,
        address: ListenOptions | None = None,
        placement: str | Sequence[str] = "near",
        actor_options: ActorOptions | None = None,
        start_timeout_s: float = 120.0,
        **options: Unpack[EnvOptions],
    ) -> None:
        given = completed("EnvFleet", EnvOptions, options)  # raises here, not in an actor
        require_count("num_endpoints", num_endpoints)
        require_seconds("start_timeout_s", start_timeout_s, allow_zero=True)
        require_resources(actor_options, is_per_endpoint=True, num_cpus=num_cpus, num_gpus=num_gpus)
        self._addresses = checked_addresses(addresses, num_endpoints, "endpoint")
        _, self._listen = listening("EnvFleet", address, "address", "data_address", "openpi")
        serialized = SerializedEnv.of(env, options)
        if not ray.is_initialized():
            ray.init()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        resources = {"num_cpus": num_cpus, "num_gpus": num_gpus}
        self._placement = Placement.of(placement, resources, actor_options, num_endpoints, nodes)
        self._start_timeout_s = start_timeout_s
        self._max_sessions = given["max_sessions"] or DEFAULT_MAX_SESSIONS
        self._secret = secrets.token_urlsafe(32)
        self._fleet = secrets.token_hex(4)
        self._num_started = 0
        self._endpoint_ids: tuple[str, ...] = ()
        # Another thread may scale the fleet while a training runs.
        self._scaling = threading.Lock()
        shared_registry()
        self._manager: Any = (
            ray.remote(EndpointOwner)
            .options(
                name=owner_name(self._fleet),
                namespace=REGISTRY_NAMESPACE,
                num_cpus=0,
                **ON_HEAD,
            )
            .remote(self._fleet, serialized)
        )
        try:
            self._grow(self._manager, num_endpoints, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def resolver(self) -> FleetResolver:
        """Resolver of the endpoints, present and future; runners get a copy."""
        is_near = self._addresses is None and self._placement.where == "near"
        return FleetResolver(self._endpoint_ids, self._fleet, self._secret, is_near=is_near)

    @property
    def addresses(self) -> list[str]:
        """The present addresses of the endpoints."""
        resolver = self.resolver
        return [resolver.address(index) for index in range(len(resolver))]

    @property
    def tokens(self) -> list[str]:
        """The token of each endpoint, in the order of ``addresses``."""
        return [derive_token(self._secret, endpoint_id) for endpoint_id in self._endpoint_ids]

    @property
    def actors(self) -> list[Any]:
        """Handles of the EnvServiceActors, in the order of ``addresses``.

        An endpoint that has moved to another node has another actor.
        """
        if (manager := self._manager) is None:
            return []
        return list(self._manager_result(manager.actors.remote(self._endpoint_ids)))

    @property
    def resources(self) -> list[dict[str, float]]:
        """What Ray reserves for each endpoint, by Ray's names, in the order of ``addresses``."""
        return [
            needs_of(self._placement.options_of(each)) for each in range(len(self._endpoint_ids))
        ]

    def scale(self, num_endpoints: int, *, timeout_s: float | None = None) -> None:
        """Change the number of endpoints, also during a training.

        The endpoints of a fleet that grows serve when this returns; runners then move sessions
        there within seconds, until all endpoints have equally many. A fleet that shrinks retires
        its last endpoints: they get no new sessions, runners move the present ones away, other
        clients get an error that the endpoint is draining, and each endpoint ends after its last
        session. This does not wait for that. Episodes of a session that moves are returned up to
        that point, as truncated.

        The number of sessions and lanes does not change with the number of endpoints: give each
        runner several sessions from the beginning (``num_envs_per_env_runner``).

        Args:
            num_endpoints: New number of endpoints, at least 1.
            timeout_s: How long new endpoints may take to serve, by default ``start_timeout_s``, or
                how long sessions may stay on retired ones before they are cut off, by default two
                minutes.

        Raises:
            ConfigurationError: ``num_endpoints`` is less than 1, ``timeout_s`` is no finite number
                of seconds, or the fleet has ``addresses``.
            CapacityError: The cluster did not place all new endpoints in time, and the fleet keeps
                those that it placed; or the sessions do not fit into so few endpoints, and none is
                retired.
            EnvStartError: The environment could not be created in a new endpoint.
            EndpointClosedError: The fleet has been stopped.
        """
        require_count("num_endpoints", num_endpoints)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, allow_zero=True)
        if self._addresses is not None:
            raise ConfigurationError(
                "a fleet with addresses keeps its size: every endpoint needs an address of its "
                "own; start another fleet"
            )
        with self._scaling:
            manager = self._manager
            if manager is None:
                raise self._closed()
            missing = num_endpoints - len(self._endpoint_ids)
            if missing > 0:
                wait_s = self._start_timeout_s if timeout_s is None else timeout_s
                self._grow(manager, missing, wait_s)
            elif missing < 0:
                wait_s = _LEAVE_TIMEOUT_S if timeout_s is None else timeout_s
                self._shrink(manager, num_endpoints, wait_s)

    def stop(self) -> None:
        """End all endpoints. Idempotent."""
        # Without the lock: scale may hold it while it waits for endpoints that never start.
        manager, self._manager = self._manager, None
        if manager is not None:
            stop_actor(manager, _STOP_TIMEOUT_S)

    def _manager_result(self, reference: Any, timeout_s: float | None = None) -> Any:
        try:
            return get_result(reference, timeout_s)
        except EndpointUnreachableError as error:
            raise self._closed(str(error)) from error

    def _closed(self, reason: str = "") -> EndpointClosedError:
        if self._manager is None:
            return EndpointClosedError("the fleet has been stopped; start a new one")
        return EndpointClosedError(
            "the fleet's endpoints are gone, because the actor that manages them is: start a new "
            f"fleet ({reason})"
        )

    def _grow(self, manager: Any, count: int, timeout_s: float) -> None:
        specs = [self._next_spec(len(self._endpoint_ids) + index) for index in range(count)]
        # Ray checks options here and now; in the manager its error would come later.
        actor_class: Any = EnvServiceActor
        for spec in specs:
            actor_class.options(**spec.options)
        starting: list[Any] = []
        try:
            actors = self._manager_result(
                manager.start.remote(specs), max(timeout_s, _MANAGER_TIMEOUT_S)
            )
            starting = [actor.address.remote() for actor in actors]
            await_start(starting, "endpoints", [spec.options for spec in specs], timeout_s)
        except BaseException as error:
            # If the wait for the manager ends early, it starts the endpoints all the same.
            pairs = zip(specs, starting, strict=False)
            served = tuple(spec.endpoint_id for spec, each in pairs if _serves(each))
            lost = [spec.endpoint_id for spec in specs if spec.endpoint_id not in served]
            try:
                self._manager_result(manager.end.remote(lost), _STOP_TIMEOUT_S)
                if self._manager is not manager:
                    raise self._closed()
            except EndpointError as closed:
                if isinstance(error, RlmeshError):
                    raise closed from error
                raise error from None
            self._endpoint_ids += served
            if isinstance(error, CapacityError) and self._endpoint_ids:
                num_now = len(self._endpoint_ids)
                raise CapacityError(f"{error}. The fleet has {num_now} endpoint(s) now") from error
            raise
        self._endpoint_ids += tuple(spec.endpoint_id for spec in specs)

    def _next_spec(self, index: int) -> EndpointSpec:
        endpoint_id = f"{self._fleet}-{self._num_started}"
        self._num_started += 1
        return EndpointSpec(
            endpoint_id,
            self._placement.options_of(index),
            derive_token(self._secret, endpoint_id),
            replace(self._listen, address=self._addresses[index] if self._addresses else None),
            is_movable=self._placement.is_near(index),
        )

    def _shrink(self, manager: Any, num_endpoints: int, timeout_s: float) -> None:
        room = num_endpoints * self._max_sessions
        num_sessions = sum(
            each.num_assigned
            for each in get_result(shared_registry().overview.remote())
            if each.fleet == self._fleet
        )
        if num_sessions > room:
            raise CapacityError(
                f"{num_sessions} sessions do not fit into {num_endpoints} endpoint(s) of "
                f"max_sessions={self._max_sessions}; keep more endpoints, or start the fleet with "
                "a higher max_sessions"
            )
        self._manager_result(manager.retire.remote(self._endpoint_ids[num_endpoints:], timeout_s))
        self._endpoint_ids = self._endpoint_ids[:num_endpoints]

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigurationError(
            "an EnvFleet cannot be sent to other processes: it ends with the one that started it; "
            "send its addresses and tokens to tasks and actors, or the config that configure "
            "returns"
        )


def _serves(starting: Any) -> bool:
    ready, _ = ray.wait([starting], timeout=0)
    try:
        return bool(ready and ray.get(ready[0]))
    except ray.exceptions.RayError:
        return False


@dataclass(slots=True)
class ManagedEndpoint:
    """An endpoint and its present actor."""

    spec: EndpointSpec
    actor: Any
    is_placed: bool = False
    """Whether a runner has opened a session with it: it is never moved again."""
    is_leaving: bool = False
    """Whether it gets no new sessions any more."""
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)


class EndpointOwner:
    """Starts, moves and ends a fleet's endpoints; an actor. It does not wait until they serve.

    The process that starts an actor owns it, and Ray ends the actor with its owner. Endpoints are
    moved at the request of a runner, so their owner cannot be the driver; this one ends with it.
    """

    def __init__(self, fleet: str, env: SerializedEnv) -> None:
        self._fleet = fleet
        self._env = durable("the environment", env)  # kept for the endpoints' restarts
        self._registry = shared_registry()
        self._endpoints: dict[str, ManagedEndpoint] = {}
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
        found = (self._endpoints.get(each) for each in endpoint_ids)
        return [each.actor for each in found if each is not None and not each.is_leaving]

    async def token(self, endpoint_id: str) -> str | None:
        """Return the token of an endpoint, for programs of the cluster that observe it."""
        endpoint = self._endpoints.get(endpoint_id)
        return None if endpoint is None else endpoint.spec.token

    async def move_near(self, endpoint_id: str, node_id: str) -> None:
        """Move an endpoint to a node, if no runner has asked for it before and the node has room.

        Returns when the endpoint serves at its final place.
        """
        endpoint = self._endpoints.get(endpoint_id)
        if endpoint is None or endpoint.is_leaving or not endpoint.spec.is_movable:
            return
        async with endpoint.moving:
            if not endpoint.is_placed:
                await self._move_to(endpoint, node_id)
                endpoint.is_placed = True

    async def retire(self, endpoint_ids: Sequence[str], timeout_s: float) -> None:
        """Give endpoints no new sessions, and end each after its last one, or ``timeout_s``."""
        for endpoint_id in endpoint_ids:
            endpoint = self._endpoints.get(endpoint_id)
            if endpoint is None or endpoint.is_leaving:
                continue
            endpoint.is_leaving = True
            await self._update_registry("retire", endpoint_id)
            draining = asyncio.create_task(self._drain(endpoint, timeout_s))
            self._draining.add(draining)
            draining.add_done_callback(self._draining.discard)

    async def stop(self) -> None:
        await self.end(list(self._endpoints))

    async def end(self, endpoint_ids: Sequence[str]) -> None:
        """End endpoints immediately, also those that ``start`` has yet to start."""
        self._ended.update(endpoint_ids)
        ending = [self._endpoints[each] for each in endpoint_ids if each in self._endpoints]
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
        if time.monotonic() < self._full_until_s.get(node_id, 0.0):
            return
        if not fits(needs_of(endpoint.spec.options), free_resources(node_id)):
            return
        actor = None
        try:
            with contextlib.suppress(TimeoutError, RlmeshError, ray.exceptions.RayError):
                async with asyncio.timeout(_MOVE_TIMEOUT_S):
                    former = await endpoint.actor.describe.remote()
                if former["node_id"] == node_id or former["num_sessions"]:
                    return
                # Elsewhere if that node turns out to be full, or is lost later.
                on_node = NodeAffinitySchedulingStrategy(
                    node_id, soft=True, _spill_on_unavailable=True
                )
                changes = {"scheduling_strategy": on_node}
                actor = self._actor(endpoint.spec, changes, announces=False)
                async with asyncio.timeout(_MOVE_TIMEOUT_S):
                    moved = await actor.describe.remote()
                if moved["node_id"] == node_id and not endpoint.is_leaving:
                    # The new actor counts from here on, even if the call fails: the registry may
                    # have its record already, and the former actor would then end itself.
                    actor, endpoint.actor = endpoint.actor, actor
                    async with asyncio.timeout(_MOVE_TIMEOUT_S):
                        await endpoint.actor.announce.remote()
                    return
            self._full_until_s[node_id] = time.monotonic() + _FULL_FOR_S
        finally:
            if actor is not None:  # the one that is not kept
                ray.kill(actor)

    async def _drain(self, endpoint: ManagedEndpoint, timeout_s: float) -> None:
        async with endpoint.moving:  # after a move the new actor is drained
            # Without an answer its sessions are lost, or their time is over.
            with contextlib.suppress(TimeoutError, RlmeshError, ray.exceptions.RayError):
                async with asyncio.timeout(timeout_s + _DRAIN_GRACE_S):
                    await endpoint.actor.drain.remote(timeout_s)
            await self._end(endpoint)

    async def _end(self, endpoint: ManagedEndpoint) -> None:
        endpoint_id = endpoint.spec.endpoint_id
        endpoint.is_leaving = True  # also for a move that has begun
        self._endpoints.pop(endpoint_id, None)
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
