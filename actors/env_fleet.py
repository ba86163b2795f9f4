"""EnvFleet: several EnvServiceActors that serve the same environment."""

import contextlib
import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any, Self

import ray

from rlmesh_ray.actors.cluster_resources import needs_of
from rlmesh_ray.actors.endpoint_startup import await_endpoints, serves
from rlmesh_ray.actors.env_actor import EnvServiceActor
from rlmesh_ray.actors.fleet_manager import EndpointSpec, start_fleet_manager
from rlmesh_ray.actors.node_placement import ActorOptions, Placement, checked_addresses
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.actors.serialized_env import SerializedEnv
from rlmesh_ray.auth.tokens import derive_token
from rlmesh_ray.envs.env_source import EnvLike
from rlmesh_ray.errors import (
    CapacityError,
    ConfigurationError,
    EndpointClosedError,
    EndpointError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.options import require_seconds
from rlmesh_ray.server.env_options import (
    DEFAULT_MAX_SESSIONS,
    DEFAULT_STEP_GRACE_S,
    truncates_on_bad_value,
)

_STOP_TIMEOUT_S = 10.0
_MANAGER_TIMEOUT_S = 30.0  # it only asks Ray for actors; its own start may take seconds
_LEAVE_TIMEOUT_S = 120.0


class EnvFleet:
    """Endpoints on Ray that serve the same environment, ready when this returns.

    The endpoints live as long as this object or until ``stop``; Ray restarts those that die.
    Make a fleet on the driver, not within a Tune trial, whose resources it would take. Usable
    as a context manager.

    Args:
        env: A Gymnasium id or a factory. An environment that can only be imported where the
            endpoints run is named by an id, ``"module:Env-v0"``; nothing of it is imported here.
        num_endpoints: How many, at least 1; ``scale`` changes it.
        num_envs: Lanes of each session with each endpoint.
        env_kwargs: Passed to ``gymnasium.make``, or to the factory.
        num_cpus: What Ray sets aside for each endpoint.
        max_sessions: See ``EnvServer``.
        validation: See ``EnvServer``.
        on_bad_value: See ``EnvServer``.
        step_grace_s: See ``EnvServer``.
        allow_calls: See ``EnvServer``.
        placement: Where endpoints run. ``"near"``: each is brought once, before its first
            session, to the node of the runner that opens it, if that has room. ``"spread"``: on
            as many nodes as there are. Or ids of nodes (``ray.nodes()[i]["NodeID"]``) that are
            taken in turns; an endpoint whose node is lost restarts elsewhere. ``resources``,
            ``label_selector`` and ``scheduling_strategy`` in ``actor_options`` come before "near".
        addresses: Where each endpoint listens, ``HOST:PORT``, one an endpoint, also after a
            restart, such as behind a gateway; none of them is brought anywhere, then, and the fleet
            keeps its size. Default: each at its own node's address, at a free port.
        actor_options: More options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ..., or a list of such mappings, one an
            endpoint; the list begins anew for endpoints that ``scale`` adds. Of an actor's
            ``runtime_env`` Ray takes ``pip``, ``uv``, ``conda``, ``env_vars`` and archives by URI,
            but no local folders; and what lies in the folder of the driver's script comes before
            all of them.
        start_timeout_s: How long to wait until all endpoints serve, their ``runtime_env`` being
            made first. Where an autoscaler has to start nodes for them, that takes minutes. While
            endpoints have no node yet, the log tells what they need and what is free.

    Raises:
        ConfigurationError: ``num_endpoints`` is less than 1, ``start_timeout_s`` is no finite
            number of seconds, ``addresses`` or ``actor_options`` are not one for each,
            ``placement`` names no node, or ``env`` cannot be pickled.
        EnvStartError: The environment could not be created, or the ``runtime_env`` not be made.
        CapacityError: The cluster did not place all endpoints in time.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        env: EnvLike,
        *,
        num_endpoints: int = 1,
        num_envs: int = 1,
        env_kwargs: Mapping[str, object] | None = None,
        num_cpus: float = 1.0,
        max_sessions: int | None = None,
        validation: str = "warn",
        on_bad_value: str = "error",
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
        allow_calls: Collection[str] = (),
        placement: str | Sequence[str] = "near",
        addresses: Sequence[str] | None = None,
        actor_options: ActorOptions | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        _require_some(num_endpoints)
        truncates_on_bad_value(on_bad_value)  # says here what is wrong with it
        require_seconds("start_timeout_s", start_timeout_s, allow_zero=True)
        self._addresses = checked_addresses(addresses, num_endpoints)
        if not ray.is_initialized():
            ray.init()
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        self._placement = Placement.of(placement, num_cpus, actor_options, num_endpoints, nodes)
        self._start_timeout_s = start_timeout_s
        self._max_sessions = max_sessions or DEFAULT_MAX_SESSIONS
        self._secret = secrets.token_urlsafe(32)
        self._fleet = secrets.token_hex(4)
        self._num_started = 0
        self._endpoint_ids: tuple[str, ...] = ()
        # Sessions may be asked to move while somebody else trains: scale is for any thread.
        self._scaling = threading.Lock()
        packed = SerializedEnv.of(env, env_kwargs)
        shared_registry()
        settings = {
            "num_envs": num_envs,
            "max_sessions": max_sessions,
            "validation": validation,
            "on_bad_value": on_bad_value,
            "step_grace_s": step_grace_s,
            "allow_calls": tuple(allow_calls),
        }
        self._manager: Any = start_fleet_manager(self._fleet, packed, settings)
        try:
            self._grow(self._manager, num_endpoints, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def resolver(self) -> FleetResolver:
        """What travels to runners: how they find the endpoints that there are now, and later."""
        is_near = self._addresses is None and self._placement.where == "near"
        return FleetResolver(self._endpoint_ids, self._fleet, self._secret, is_near=is_near)

    @property
    def addresses(self) -> list[str]:
        """Where the endpoints are now."""
        resolver = self.resolver
        return [resolver.address(index) for index in range(len(resolver))]

    @property
    def tokens(self) -> list[str]:
        """What clients must show, to each endpoint its own, in the order of ``addresses``."""
        return [derive_token(self._secret, endpoint_id) for endpoint_id in self._endpoint_ids]

    @property
    def actors(self) -> list[Any]:
        """Handles of the EnvServiceActors, in the order of ``addresses``.

        Those of endpoints that are brought to another node are others afterwards.
        """
        manager = self._manager
        return (
            list(self._manager_result(manager.actors.remote(self._endpoint_ids))) if manager else []
        )

    @property
    def resources(self) -> list[dict[str, float]]:
        """What Ray sets aside for each endpoint, by Ray's names, in the order of ``addresses``."""
        return [
            needs_of(self._placement.options_of(index)) for index in range(len(self._endpoint_ids))
        ]

    def scale(self, num_endpoints: int, *, timeout_s: float | None = None) -> None:
        """Give the fleet another number of endpoints, also while somebody trains on it.

        A fleet that grows has its new endpoints when this returns; runners then move sessions there
        by themselves, within seconds, until all endpoints have as many. One that shrinks gives up
        its last endpoints: they get no new sessions, runners move those that they have, other
        clients that come are told that the endpoint is draining, and each ends when its last
        session has ended. This does not wait for that. Episodes that run in a session that moves
        are returned as far as they have come, as truncated.

        How many sessions and lanes there are does not change with the number of endpoints: have
        several sessions for each runner from the beginning (``num_envs_per_env_runner``).

        Args:
            num_endpoints: How many it shall have, at least 1.
            timeout_s: How long new endpoints may take to serve, by default ``start_timeout_s``, or
                sessions to leave those that go, by default two minutes: then they are cut off.

        Raises:
            ConfigurationError: ``num_endpoints`` is less than 1, ``timeout_s`` is no finite number
                of seconds, or the fleet has ``addresses``.
            CapacityError: The cluster did not place all new endpoints in time, and those that were
                placed stay; or the sessions do not fit into so few endpoints, and all stay.
            EnvStartError: The environment could not be created in a new endpoint.
            EndpointClosedError: The fleet has been stopped.
        """
        _require_some(num_endpoints)
        if timeout_s is not None:
            require_seconds("timeout_s", timeout_s, allow_zero=True)
        if self._addresses is not None:
            raise ConfigurationError(
                "a fleet with addresses keeps its size: every endpoint needs one of its own; start "
                "another fleet"
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
        # Not in turns with scale, which may be waiting for endpoints that will never start.
        manager, self._manager = self._manager, None
        if manager is None or not ray.is_initialized():
            return
        try:
            with contextlib.suppress(EndpointError):
                get_result(manager.end.remote(), _STOP_TIMEOUT_S)
        finally:
            ray.kill(manager)

    def _manager_result(self, reference: Any, timeout_s: float | None = None) -> Any:
        """Wait for an answer of the keeper.

        Raises:
            EndpointClosedError: It has ended.
        """
        try:
            return get_result(reference, timeout_s)
        except EndpointUnreachableError as error:
            raise self._closed(str(error)) from error

    def _closed(self, reason: str = "") -> EndpointClosedError:
        if self._manager is None:
            return EndpointClosedError("the fleet has been stopped; start a new one")
        return EndpointClosedError(
            "the fleet's endpoints are gone, since the actor that keeps them is: start a new fleet "
            f"({reason})"
        )

    def _grow(self, manager: Any, count: int, timeout_s: float) -> None:
        specs = [self._launch(len(self._endpoint_ids) + index) for index in range(count)]
        # Ray says on the spot what is wrong with options; a keeper would say it for later.
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
            # Whoever stops waiting for the keeper knows of none, and it starts them all the same.
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

    def _launch(self, index: int) -> EndpointSpec:
        endpoint_id = f"{self._fleet}-{self._num_started}"
        self._num_started += 1
        return EndpointSpec(
            endpoint_id,
            self._placement.options_of(index),
            derive_token(self._secret, endpoint_id),
            self._addresses[index] if self._addresses else None,
            is_movable=self._placement.is_near(index),
        )

    def _add(self, specs: Iterable[EndpointSpec]) -> None:
        self._endpoint_ids += tuple(spec.endpoint_id for spec in specs)

    def _shrink(self, manager: Any, num_endpoints: int, timeout_s: float) -> None:
        room = num_endpoints * self._max_sessions
        seats = sum(
            each.num_assigned
            for each in get_result(shared_registry().overview.remote())
            if each.record.fleet == self._fleet
        )
        if seats > room:
            raise CapacityError(
                f"{seats} sessions do not fit into {num_endpoints} endpoint(s) of "
                f"max_sessions={self._max_sessions}; keep more endpoints, or start the fleet with "
                "a higher max_sessions"
            )
        self._manager_result(manager.retire.remote(self._endpoint_ids[num_endpoints:], timeout_s))
        self._endpoint_ids = self._endpoint_ids[:num_endpoints]

    def __reduce__(self) -> tuple[Any, ...]:
        raise ConfigurationError(
            "an EnvFleet stays where it was started, and ends there; send its addresses and tokens "
            "to tasks and actors, or what configure returns"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _require_some(num_endpoints: int) -> None:
    is_count = isinstance(num_endpoints, Integral) and not isinstance(num_endpoints, bool)
    if not is_count or num_endpoints < 1:
        raise ConfigurationError(f"num_endpoints={num_endpoints!r} must be a number of at least 1")
