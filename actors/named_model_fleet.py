"""NamedModelFleet: handle of a fleet of served policies that another program has started."""

import time
from typing import Any

import ray

from rlmesh_ray.actors.ray_calls import get_outcomes, get_result, get_results
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, find_registry
from rlmesh_ray.actors.weight_store import FleetRecord, offer
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError, PolicyError
from rlmesh_ray.server.health import Health

POLL_S = 0.02
"""How often to check whether an actor has ended, for which Ray has no notification."""

_HEALTH_TIMEOUT_S = 5.0


def actor_name(fleet: str, endpoint_id: str = "") -> str:
    """Return the name of a replica's actor; without an id that of the fleet's weight store."""
    return f"model-fleet/{fleet}/{endpoint_id}"


def find_actor(fleet: str, endpoint_id: str = "") -> Any:
    """Return the handle of a fleet's replica, or of its weight store.

    Raises:
        EndpointUnreachableError: The fleet does not exist, or has been stopped.
    """
    try:
        return ray.get_actor(actor_name(fleet, endpoint_id), namespace=REGISTRY_NAMESPACE)
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
        registry = find_registry()
        ids = self._record().endpoint_ids
        records = get_results([registry.lookup.remote(endpoint_id) for endpoint_id in ids])
        return [str(record.address) for record in records if record is not None]

    @property
    def resolver(self) -> FleetResolver:
        """Resolver of the replicas, by index, also while one restarts or drains."""
        return FleetResolver(self._record().endpoint_ids)

    @property
    def actors(self) -> list[Any]:
        """Handles of the replicas; see ``ModelReplica`` for their methods."""
        return [find_actor(self.name, endpoint_id) for endpoint_id in self._record().endpoint_ids]

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
            ConfigurationError: There is no such replica.
        """
        actors = self.actors if replica is None else [self._actor(replica)]
        return all(get_results([actor.drain.remote(timeout_s) for actor in actors]))

    def restart(self, replica: int, *, drain_timeout_s: float = 0.0) -> None:
        """Drain one replica, end its process and wait until it serves again.

        Args:
            replica: Index of the replica in ``actors``.
            drain_timeout_s: After how long sessions that are still open are cut off.

        Raises:
            ConfigurationError: There is no such replica.
        """
        self.drain(drain_timeout_s, replica=replica)
        actor = self._actor(replica)
        former = get_result(actor.describe.remote())["pid"]
        ray.kill(actor, no_restart=False)
        # Ray kills asynchronously: the former process may still answer first.
        while get_result(actor.describe.remote())["pid"] == former:
            time.sleep(POLL_S)

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
        """Have the replicas load an offer; return the newest version that acts."""
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
        return find_actor(self.name)

    def _record(self) -> FleetRecord:
        record: FleetRecord = get_result(self._store().record.remote())
        return record
