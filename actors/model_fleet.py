"""ModelFleet: several replicas that serve one policy under one name."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import ray

from rlmesh_ray.actors.actor_restart import durable
from rlmesh_ray.actors.model_actor import ModelReplica
from rlmesh_ray.actors.named_model_fleet import POLL_S, NamedModelFleet, actor_name, find_actor
from rlmesh_ray.actors.placement_options import checked_addresses, require_resources
from rlmesh_ray.actors.ray_calls import await_start
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.actors.weight_store import FleetRecord, start_weight_store
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError
from rlmesh_ray.options import completed, require_count, takes_options
from rlmesh_ray.server.model_options import ModelFleetOptions

_NAME_TIMEOUT_S = 10.0


@takes_options(ModelFleetOptions)
class ModelFleet(NamedModelFleet):
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
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
        **options: Unpack[ModelFleetOptions],
    ) -> None:
        completed("ModelFleet", ModelFleetOptions, options)  # raises here, not in an actor
        super().__init__(name)
        require_count("num_replicas", num_replicas)
        require_resources(actor_options, num_cpus=num_cpus, num_gpus=num_gpus)
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
            # Not in the placement group of the caller.
            "scheduling_strategy": "DEFAULT",
            **(actor_options or {}),
        }
        actor_class: Any = ModelReplica
        self._replicas = [
            actor_class.options(
                name=actor_name(name, endpoint_id), namespace=REGISTRY_NAMESPACE, **of_ray
            ).remote(
                actor_name(name),
                self._policy,
                address=place,
                token=record.token,
                endpoint_id=endpoint_id,
                fleet=f"model/{name}",
                **options,
            )
            for endpoint_id, place in zip(endpoint_ids, places, strict=True)
        ]
        try:
            starting = [actor.address.remote() for actor in self._replicas]
            needs = [{"CPU": num_cpus, "GPU": num_gpus}] * num_replicas
            await_start(starting, "replicas", needs, start_timeout_s)
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


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
                find_actor(fleet, endpoint_id)
            except EndpointUnreachableError:
                break
            time.sleep(POLL_S)
