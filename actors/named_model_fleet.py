"""NamedModelFleet: what can be done with a fleet of served policies by whoever knows its name."""

import time
from typing import Any

import ray

from rlmesh_ray.actors.ray_calls import get_outcomes, get_result, get_results
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, find_registry
from rlmesh_ray.actors.weight_store import FleetRecord, offer
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError, PolicyError
from rlmesh_ray.server.health import Health

POLL_S = 0.02
"""How often to look for what Ray tells nobody: that an actor has ended."""

_HEALTH_TIMEOUT_S = 5.0


def actor_name(fleet: str, endpoint_id: str = "") -> str:
    """Name the actor of an endpoint, or the fleet's keeper of weights."""
    return f"model-fleet/{fleet}/{endpoint_id}"


def find_actor(fleet: str, endpoint_id: str = "") -> Any:
    """Return the handle of a fleet's replica, or of its keeper of weights.

    Raises:
        EndpointUnreachableError: There is none; the fleet has been stopped, or never was.
    """
    try:
        return ray.get_actor(actor_name(fleet, endpoint_id), namespace=REGISTRY_NAMESPACE)
    except ValueError as error:
        raise EndpointUnreachableError(
            f"no model fleet called {fleet!r} runs in this cluster"
        ) from error


class NamedModelFleet:
    """A fleet that somebody has started, known by its name; it is looked up at each use.

    Works wherever Ray does: in other drivers and namespaces, in tasks and actors. Whoever has
    started the fleet ends it.

    Args:
        name: As given to ``ModelFleet``.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def token(self) -> str:
        """What clients must show."""
        return self._record().token

    @property
    def addresses(self) -> list[str]:
        """Where the replicas are that take new sessions; those that restart may be missing."""
        registry = find_registry()
        ids = self._record().endpoint_ids
        records = get_results([registry.lookup.remote(endpoint_id) for endpoint_id in ids])
        return [str(record.address) for record in records if record is not None]

    @property
    def resolver(self) -> FleetResolver:
        """Where each of the replicas is; each keeps its place while it restarts, or is drained."""
        return FleetResolver(self._record().endpoint_ids)

    @property
    def actors(self) -> list[Any]:
        """Handles of the replicas; see ``ModelReplica`` for their methods."""
        return [find_actor(self.name, endpoint_id) for endpoint_id in self._record().endpoint_ids]

    @property
    def policy_version(self) -> int:
        """The version that all replicas act with, or have for when they have restarted."""
        return int(get_result(self._store().accepted_version.remote()))

    def set_weights(
        self, weights: object, version: int | None = None, *, timeout_s: float = 120.0
    ) -> int:
        """Let all replicas act with new weights; blocks until they do, restarting ones as well.

        Args:
            weights: What the policy's ``set_weights`` takes, a reference to it, or a mapping of
                which some values are references.
            version: Of these weights, an integer up to 2**63 - 1 that is larger than the present
                one; default: one more than that.
            timeout_s: How long to wait for each step of it.

        Returns:
            The version that acts from now on: this one, or a newer one of somebody else.

        Raises:
            PolicyError: The policy does not take them; the former ones act on.
            ConfigurationError: The policy cannot take any, or ``version`` is no such integer.
            EndpointTimeoutError: A replica has not taken them up in time; it will when it can.
            EndpointUnreachableError: The fleet has been stopped, or a replica is gone for good.
        """
        store = self._store()
        offered = int(get_result(offer(store, weights, version), timeout_s))
        acting = self._try(store, offered, timeout_s)
        if acting > offered and acting > self._newest_version(store):
            # The keeper was restarted and has begun to count anew.
            offered = int(get_result(offer(store, weights, None, acting), timeout_s))
            acting = self._try(store, offered, timeout_s)
        return acting

    def health(self, timeout_s: float = _HEALTH_TIMEOUT_S) -> list[Health]:
        """Ask every replica whether it can serve; one that does not answer in time cannot."""
        told = get_outcomes([actor.health.remote() for actor in self.actors], timeout_s)
        return [
            Health(is_serving=False, reason=str(health))
            if isinstance(health, Exception)
            else health
            for health in told
        ]

    def drain(self, timeout_s: float, *, replica: int | None = None) -> bool:
        """Take no new sessions, and wait until the open ones have ended.

        ``addresses`` no longer has the replica, and its health says that it does not serve.

        Args:
            timeout_s: How long to wait.
            replica: Which, by its place in ``actors``; None: all.

        Returns:
            Whether no session is open any more.

        Raises:
            ConfigurationError: There is no such replica.
        """
        actors = self.actors if replica is None else [self._actor(replica)]
        return all(get_results([actor.drain.remote(timeout_s) for actor in actors]))

    def restart(self, replica: int, *, drain_timeout_s: float = 0.0) -> None:
        """Drain one replica, end its process and wait until it serves again.

        Args:
            replica: Which, by its place in ``actors``.
            drain_timeout_s: After how long sessions that are still open are cut off.

        Raises:
            ConfigurationError: There is no such replica.
        """
        self.drain(drain_timeout_s, replica=replica)
        actor = self._actor(replica)
        former = get_result(actor.describe.remote())["pid"]
        ray.kill(actor, no_restart=False)
        # Ray kills in its own time: the process that answers first may still be the former one.
        while get_result(actor.describe.remote())["pid"] == former:
            time.sleep(POLL_S)

    def _actor(self, replica: int) -> Any:
        actors = self.actors
        is_place = isinstance(replica, int) and not isinstance(replica, bool)
        if not is_place or not 0 <= replica < len(actors):
            there = ", ".join(map(str, range(len(actors))))
            raise ConfigurationError(
                f"replica={replica!r} is not one of the fleet's replicas: {there}"
            )
        return actors[replica]

    def _try(self, store: Any, offered: int, timeout_s: float) -> int:
        """Have the replicas take up an offer; return the newest version that acts."""
        tried = get_outcomes([actor.follow.remote() for actor in self.actors], timeout_s)
        versions = [outcome for outcome in tried if isinstance(outcome, int)]
        errors = [outcome for outcome in tried if isinstance(outcome, Exception)]
        if versions or not isinstance(errors[0], PolicyError | ConfigurationError):
            # What one replica can act with, all can; some may have to restart first.
            get_result(store.accept.remote(offered), timeout_s)
        else:
            get_result(store.reject.remote(offered), timeout_s)
        if errors:
            raise errors[0]
        return max(versions)

    def _newest_version(self, store: Any) -> int:
        newest = get_result(store.newest.remote())
        return int(newest[0].version) if newest else 0

    def _store(self) -> Any:
        return find_actor(self.name)

    def _record(self) -> FleetRecord:
        record: FleetRecord = get_result(self._store().record.remote())
        return record
