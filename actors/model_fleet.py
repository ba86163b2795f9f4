"""ModelFleet: several replicas that serve one policy under one name; and handles of such fleets."""

import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import ray

from rlmesh_ray.actors.model_actor import FleetRecord, ModelReplica, offer, start_weight_store
from rlmesh_ray.actors.placement import (
    OUTSIDE,
    await_start,
    checked_addresses,
    require_resources,
)
from rlmesh_ray.actors.ray_calls import (
    StoppedAtExit,
    durable,
    get_outcomes,
    get_result,
    get_results,
)
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver, call_registry
from rlmesh_ray.actors.registry.registry_actor import (
    REGISTRY_NAMESPACE,
    find_actor,
    shared_registry,
)
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError, PolicyError
from rlmesh_ray.options import completed, require_count, takes_options
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions, listening
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.server.model.model_options import ModelFleetOptions

_NAME_TIMEOUT_S = 10.0
_POLL_S = 0.02
"""How often to check whether an actor has ended, for which Ray has no notification."""

_HEALTH_TIMEOUT_S = 5.0


def actor_name(fleet: str, endpoint_id: str = "") -> str:
    """Return the name of a replica's actor; without an id that of the fleet's weight store."""
    return f"model-fleet/{fleet}/{endpoint_id}"


def find_replica(fleet: str, endpoint_id: str = "") -> Any:
    """Return the handle of a fleet's replica, or, without an id, that of its weight store."""
    try:
        return find_actor(actor_name(fleet, endpoint_id))
    except ValueError as error:
        raise EndpointUnreachableError(
            f"the cluster has no model fleet {fleet!r}; it was never started, or has been stopped"
        ) from error


class NamedModelFleet:
    """A ``ModelFleet`` of another program, looked up by its name at each use.

    Usable in other drivers and namespaces, in tasks and actors. The program that started the fleet
    stops it.

    Args:
        name: The ``name`` of the ``ModelFleet``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def token(self) -> TokenSource:
        """The token that clients must present."""
        return self._record().token

    @property
    def addresses(self) -> list[str]:
        """Addresses of the replicas that accept sessions, without those that restart."""
        records = [call_registry("lookup", each) for each in self._record().endpoint_ids]
        return [str(record.address) for record in records if record is not None]

    @property
    def resolver(self) -> FleetResolver:
        """Resolver of the replicas, by index, also while one restarts or drains."""
        return FleetResolver(self._record().endpoint_ids)

    @property
    def actors(self) -> list[Any]:
        """Handles of the replicas; see ``ModelReplica`` for their methods."""
        return [find_replica(self.name, each) for each in self._record().endpoint_ids]

    @property
    def policy_version(self) -> int:
        """Version of the weights of all replicas; one that restarts gets them, too."""
        return int(get_result(self._store().accepted_version.remote()))

    def set_weights(
        self, weights: object, version: int | None = None, *, timeout_s: float = 120.0
    ) -> int:
        """Replace the weights of all replicas; blocks until they act, also in restarting ones.

        Args:
            weights: The argument of the policy's ``set_weights``, an object reference to it, or a
                mapping with references as values.
            version: Version of these weights, an integer up to 2**63 - 1 that is larger than the
                present one; default: one more than the present one.
            timeout_s: How long to wait for each step: the offer, the replicas, the acceptance.

        Returns:
            The version that acts from now on: this one, or a newer one that another caller set.

        Raises:
            PolicyError: The policy refuses the weights; the former ones act on.
            ConfigurationError: The policy cannot take weights, or ``version`` is invalid.
            EndpointTimeoutError: A replica has not loaded them in time; it loads them later.
            EndpointUnreachableError: The fleet has been stopped, or a replica is gone for good.
        """
        store = self._store()
        # A weight store that has been restarted has lost its count of versions.
        known = get_outcomes([actor.policy_version.remote() for actor in self.actors], timeout_s)
        floor = max((each for each in known if isinstance(each, int)), default=0)
        offered = int(get_result(offer(store, weights, version, floor), timeout_s))
        return self._try(store, offered, timeout_s)

    def health(self, timeout_s: float = _HEALTH_TIMEOUT_S) -> list[Health]:
        """Return the health of every replica; one that does not answer in time is not serving."""
        answers = get_outcomes([actor.health.remote() for actor in self.actors], timeout_s)
        return [
            Health(is_serving=False, reason=str(health))
            if isinstance(health, Exception)
            else health
            for health in answers
        ]

    def drain(self, timeout_s: float, *, replica: int | None = None) -> bool:
        """Accept no new sessions, and wait until the open ones have ended.

        ``addresses`` no longer has the replica, and its health says that it does not serve.

        Args:
            timeout_s: How long to wait.
            replica: Index of the replica in ``actors``; None: all.

        Returns:
            Whether all sessions have ended.

        Raises:
            ConfigurationError: No replica has this number.
        """
        actors = self.actors if replica is None else [self._actor(replica)]
        return all(get_results([actor.drain.remote(timeout_s) for actor in actors]))

    def restart(self, replica: int, *, drain_timeout_s: float = 0.0) -> None:
        """Drain one replica, end its process and wait until it serves again.

        Args:
            replica: Index of the replica in ``actors``.
            drain_timeout_s: After how long sessions that are still open are cut off.

        Raises:
            ConfigurationError: No replica has this number.
        """
        self.drain(drain_timeout_s, replica=replica)
        actor = self._actor(replica)
        former = get_result(actor.describe.remote())["pid"]
        ray.kill(actor, no_restart=False)
        # Ray kills asynchronously: the former process may still answer first.
        while get_result(actor.describe.remote())["pid"] == former:
            time.sleep(_POLL_S)

    def _actor(self, replica: int) -> Any:
        actors = self.actors
        is_index = isinstance(replica, int) and not isinstance(replica, bool)
        if not is_index or not 0 <= replica < len(actors):
            indices = ", ".join(map(str, range(len(actors))))
            raise ConfigurationError(
                f"replica={replica!r} is not one of the fleet's replicas: {indices}"
            )
        return actors[replica]

    def _try(self, store: Any, offered: int, timeout_s: float) -> int:
        tried = get_outcomes([actor.follow.remote() for actor in self.actors], timeout_s)
        versions = [outcome for outcome in tried if isinstance(outcome, int)]
        errors = [outcome for outcome in tried if isinstance(outcome, Exception)]
        if versions or not isinstance(errors[0], PolicyError | ConfigurationError):
            # Weights that one replica accepts, all accept; some may have to restart first.
            get_result(store.accept.remote(offered), timeout_s)
        else:
            get_result(store.reject.remote(offered), timeout_s)
        if errors:
            raise errors[0]
        return max(versions)

    def _store(self) -> Any:
        return find_replica(self.name)

    def _record(self) -> FleetRecord:
        record: FleetRecord = get_result(self._store().record.remote())
        return record


@takes_options(ModelFleetOptions)
class ModelFleet(StoppedAtExit, NamedModelFleet):
    """Replicas on Ray that serve one policy, ready when the constructor returns.

    The replicas live as long as this object or until ``stop``; Ray restarts those that die, and
    they serve again with their last weights, at another port. Make a fleet on the driver, not
    within a Tune trial, whose resources it would take. Usable as a context manager. Sent to another
    process, it becomes a ``NamedModelFleet``.

    Args:
        policy: A path or ``module:factory`` on every node, or a policy; see ``ModelServiceActor``.
        name: Name of the fleet, unique in the cluster.
        num_replicas: Number of replicas, at least 1.
        num_cpus: CPUs that Ray reserves for each replica.
        num_gpus: GPUs that Ray reserves for each replica; a fraction lets replicas share one.
        token: Token that clients must present, or a ``TokenFile`` on the replicas' nodes; default:
            a new one.
        addresses: The address of each replica, ``HOST:PORT``, one for each, also after a restart.
            Ray chooses the node, and two replicas on one node cannot share a port. Default: each
            at its own node's address, at a free port.
        address: ``ListenOptions`` with ``accept_edition_texts`` and ``idle_timeout_s`` of each
            replica; the other fields are refused.
        actor_options: Further options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ...
        start_timeout_s: How long to wait until all replicas serve.
        **options: Those of ``ModelFleetOptions``, of each replica.

    Raises:
        ConfigurationError: ``num_replicas`` is less than 1, ``addresses`` are not one for each,
            the cluster has a fleet of this name, or ``policy`` names none.
        PolicyError: The policy could not be loaded.
        CapacityError: The cluster did not place all replicas in time.
    """

    def __init__(  # where replicas run; how they serve is in ``options``
        self,
        policy: object,
        *,
        name: str,
        num_replicas: int = 1,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        token: TokenSource | None = None,
        addresses: Sequence[str] | None = None,
        address: ListenOptions | None = None,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
        **options: Unpack[ModelFleetOptions],
    ) -> None:
        completed("ModelFleet", ModelFleetOptions, options)  # raises here, not in an actor
        super().__init__(name)
        require_count("num_replicas", num_replicas)
        require_resources(actor_options, num_cpus=num_cpus, num_gpus=num_gpus)
        _, listen = listening("ModelFleet", address, "address", "data_address", "openpi")
        places = checked_addresses(addresses, num_replicas, "replica") or [None] * num_replicas
        endpoint_ids = tuple(f"{name}/{index}" for index in range(num_replicas))
        record = FleetRecord(endpoint_ids, token or secrets.token_urlsafe(32))
        self._policy = durable("the policy", policy)
        self._registry = shared_registry()
        self._weight_store = _start_store(name, record)
        self._endpoint_ids = endpoint_ids
        of_ray = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            **OUTSIDE,
            **(actor_options or {}),
        }
        actor_class: Any = ModelReplica
        self._replicas = [
            actor_class.options(
                name=actor_name(name, endpoint_id), namespace=REGISTRY_NAMESPACE, **of_ray
            ).remote(
                actor_name(name),
                self._policy,
                address=replace(listen, address=place),
                token=record.token,
                endpoint_id=endpoint_id,
                fleet=f"model/{name}",
                **options,
            )
            for endpoint_id, place in zip(endpoint_ids, places, strict=True)
        ]
        try:
            starting = [actor.address.remote() for actor in self._replicas]
            await_start(starting, "replicas", [of_ray] * num_replicas, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def find(name: str) -> NamedModelFleet:
        """Return the fleet of that name, which another program has started and will stop.

        Raises:
            EndpointUnreachableError: The cluster has none of that name.
        """
        fleet = NamedModelFleet(name)
        fleet._record()
        return fleet

    def stop(self) -> None:
        """End all replicas at once; call ``drain`` first to let sessions end. Idempotent."""
        replicas, self._replicas = self._replicas, []
        if not replicas:
            return
        for endpoint_id in self._endpoint_ids:
            self._registry.withdraw.remote(endpoint_id)
        for actor in (*replicas, self._weight_store):
            ray.kill(actor)
        _await_free(self.name, ("", *self._endpoint_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        return (NamedModelFleet, (self.name,))


def _start_store(name: str, record: FleetRecord) -> Any:
    try:
        return start_weight_store(actor_name(name), record)
    except ValueError as error:
        raise ConfigurationError(
            f"the cluster has a model fleet {name!r} already; use it (ModelFleet.find({name!r})), "
            "or give this one another name"
        ) from error


def _await_free(fleet: str, endpoint_ids: Sequence[str]) -> None:
    """Wait until the actors' names are free again: Ray ends actors asynchronously."""
    deadline_s = time.monotonic() + _NAME_TIMEOUT_S
    for endpoint_id in endpoint_ids:
        while time.monotonic() < deadline_s:
            try:
                find_replica(fleet, endpoint_id)
            except EndpointUnreachableError:
                break
            time.sleep(_POLL_S)
