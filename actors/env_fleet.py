"""EnvFleet: several EnvServiceActors that serve the same environment."""

import contextlib
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import ray

from rlmesh_ray.actors.cluster_resources import needs_of
from rlmesh_ray.actors.endpoint_owner import EndpointSpec, start_endpoint_owner
from rlmesh_ray.actors.env_actor import EnvServiceActor, SerializedEnv
from rlmesh_ray.actors.placement_options import (
    ActorOptions,
    Placement,
    checked_addresses,
    require_resources,
)
from rlmesh_ray.actors.ray_calls import StoppedAtExit, await_start, get_result
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.auth.token_file import derive_token
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointUnreachableError,
    EnvStartError,
    RlmeshError,
)
from rlmesh_ray.options import completed, require_count, require_seconds, takes_options
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions, listening
from rlmesh_ray.server.env.env_options import DEFAULT_MAX_SESSIONS, EnvOptions

_STOP_TIMEOUT_S = 10.0
_MANAGER_TIMEOUT_S = 30.0  # to request actors from Ray; its own start may take seconds
_LEAVE_TIMEOUT_S = 120.0


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
        self._manager: Any = start_endpoint_owner(self._fleet, serialized)
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
        manager = self._manager
        return (
            list(self._manager_result(manager.actors.remote(self._endpoint_ids))) if manager else []
        )

    @property
    def resources(self) -> list[dict[str, float]]:
        """What Ray reserves for each endpoint, by Ray's names, in the order of ``addresses``."""
        return [
            needs_of(self._placement.options_of(index)) for index in range(len(self._endpoint_ids))
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
        if manager is None or not ray.is_initialized():
            return
        try:
            with contextlib.suppress(EndpointError):
                get_result(manager.end.remote(), _STOP_TIMEOUT_S)
        finally:
            ray.kill(manager)

    def _manager_result(self, reference: Any, timeout_s: float | None = None) -> Any:
        """Wait for an answer of the fleet manager.

        Raises:
            EndpointClosedError: The manager has ended.
        """
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
            await_endpoints(starting, [spec.options for spec in specs], timeout_s)
        except BaseException as error:
            # If the wait for the manager ends early, it starts the endpoints all the same.
            served = [serves(each) for each in starting] or [False] * count
            lost = [
                each.endpoint_id for each, is_up in zip(specs, served, strict=True) if not is_up
            ]
            try:
                self._manager_result(manager.end.remote(lost), _STOP_TIMEOUT_S)
                if self._manager is not manager:
                    raise self._closed()
            except EndpointError as closed:
                if isinstance(error, RlmeshError):
                    raise closed from error
                raise error from None
            self._add(each for each, is_up in zip(specs, served, strict=True) if is_up)
            if isinstance(error, CapacityError) and self._endpoint_ids:
                num_now = len(self._endpoint_ids)
                raise CapacityError(f"{error}. The fleet has {num_now} endpoint(s) now") from error
            raise
        self._add(specs)

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

    def _add(self, specs: Iterable[EndpointSpec]) -> None:
        self._endpoint_ids += tuple(spec.endpoint_id for spec in specs)

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


def await_endpoints(
    starting: Sequence[Any], options: Sequence[Mapping[str, Any]], timeout_s: float
) -> None:
    """Wait until endpoints serve.

    Args:
        starting: The first call to each endpoint's actor.
        options: Ray's options of each actor.
        timeout_s: Time for all of them together.

    Raises:
        RlmeshError: An endpoint could not start its server.
        EnvStartError: Its ``runtime_env`` could not be set up.
        EndpointUnreachableError: An actor could not be created.
        CapacityError: The cluster did not place all of them in time.
    """
    try:
        await_start(starting, "endpoints", [needs_of(each) for each in options], timeout_s)
    except CapacityError as error:
        _, late = ray.wait(list(starting), num_returns=len(starting), timeout=0)
        further = _further_needs(options[list(starting).index(late[0])]) if late else ""
        if not further:
            raise
        raise CapacityError(f"{error}. By actor_options each also needs {further}") from error
    except ray.exceptions.RuntimeEnvSetupError as error:
        # The texts of Ray's errors end with the cause's traceback.
        cause = str(error).strip().splitlines()[-1]
        raise EnvStartError(
            f"the runtime_env of the endpoints cannot be set up: {cause}", str(error)
        ) from error


def serves(starting: Any) -> bool:
    """Return whether an endpoint serves, by the first call to its actor."""
    ready, _ = ray.wait([starting], timeout=0)
    try:
        return bool(ready and ray.get(ready[0]))
    except ray.exceptions.RayError:
        return False


def _further_needs(options: Mapping[str, Any]) -> str:
    needs = []
    if options.get("label_selector"):
        needs.append(f"a node with labels {dict(options['label_selector'])}")
    if options.get("runtime_env"):
        needs.append("its runtime_env to be set up, which may take longer than start_timeout_s")
    return ", ".join(needs)
