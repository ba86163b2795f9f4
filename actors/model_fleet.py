"""ModelFleet: several replicas that serve one policy under one name."""

import secrets
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import ray

from rlmesh_ray.actors.durable_args import durable
from rlmesh_ray.actors.model_actor import ModelReplica
from rlmesh_ray.actors.named_model_fleet import POLL_S, NamedModelFleet, actor_name, find_actor
from rlmesh_ray.actors.ray_calls import await_start
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.actors.weight_store import FleetRecord, start_weight_store
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.models.batcher import DEFAULT_MAX_ROWS
from rlmesh_ray.server.policy_health import DEFAULT_STUCK_AFTER_S

_NAME_TIMEOUT_S = 10.0


class ModelFleet(NamedModelFleet):
    """Replicas on Ray that serve one policy, ready when this returns.

    They live as long as this object or until ``stop``; Ray restarts those that die, and they come
    back with the weights that they had, at another port. Make a fleet on the driver, not within a
    Tune trial, whose resources it would take. Usable as a context manager. Where it is sent to
    another process, a ``NamedModelFleet`` arrives.

    Args:
        policy: A path or ``module:factory`` on every node, or a policy; see ``ModelServiceActor``.
        name: No other fleet of the cluster may have it.
        num_replicas: How many, at least 1.
        num_cpus: What Ray sets aside for each replica.
        num_gpus: Likewise; a fraction lets replicas share one.
        token: What clients must show; default: a new one.
        addresses: Where each replica listens, ``HOST:PORT``, one a replica: no two can share a
            port of one node, and Ray says which node a replica gets. Default: each at its own
            node's address, at a free port.
        explore: See ``ModelServiceActor``.
        device: See ``ModelServiceActor``.
        buckets: See ``ModelServiceActor``.
        compile: See ``ModelServiceActor``.
        max_batch_rows: See ``ModelServer``.
        max_message_bytes: See ``ModelServer``.
        torch_threads: See ``ModelServer``.
        stuck_after_s: See ``ModelServer``.
        idle_timeout_s: See ``ModelServer``.
        actor_options: More options of each Ray actor: ``resources``, ``label_selector``,
            ``runtime_env``, ``scheduling_strategy``, ...
        start_timeout_s: How long to wait until all replicas serve.

    Raises:
        ConfigurationError: ``num_replicas`` is less than 1, ``addresses`` are not one for each,
            a fleet of this name exists, or ``policy`` names none.
        PolicyError: The policy could not be loaded.
        CapacityError: The cluster did not place all replicas in time.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        policy: object,
        *,
        name: str,
        num_replicas: int = 1,
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        token: str | None = None,
        addresses: Sequence[str] | None = None,
        explore: bool = False,
        device: str = "auto",
        buckets: Sequence[int] = (),
        compile: bool = False,
        max_batch_rows: int = DEFAULT_MAX_ROWS,
        max_message_bytes: int | None = None,
        torch_threads: int = 1,
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        idle_timeout_s: float | None = None,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        super().__init__(name)
        places = _places(num_replicas, addresses)
        endpoint_ids = tuple(f"{name}/{index}" for index in range(num_replicas))
        record = FleetRecord(endpoint_ids, token or secrets.token_urlsafe(32))
        self._policy = durable("the policy", policy)
        self._registry = shared_registry()
        self._kept = _start_store(name, record)
        self._endpoint_ids = endpoint_ids
        options = {
            "num_cpus": num_cpus,
            "num_gpus": num_gpus,
            # Not into the placement group of whoever happens to call this.
            "scheduling_strategy": "DEFAULT",
            **(actor_options or {}),
        }
        actor_class: Any = ModelReplica
        self._replicas = [
            actor_class.options(
                name=actor_name(name, endpoint_id), namespace=REGISTRY_NAMESPACE, **options
            ).remote(
                actor_name(name),
                self._policy,
                address=place,
                token=record.token,
                endpoint_id=endpoint_id,
                fleet=f"model/{name}",
                explore=explore,
                device=device,
                buckets=tuple(buckets),
                compile=compile,
                max_batch_rows=max_batch_rows,
                max_message_bytes=max_message_bytes,
                torch_threads=torch_threads,
                stuck_after_s=stuck_after_s,
                accept_edition_texts=(),
                dialects=None,
                idle_timeout_s=idle_timeout_s,
            )
            for endpoint_id, place in zip(endpoint_ids, places, strict=True)
        ]
        try:
            starting = [actor.address.remote() for actor in self._replicas]
            await_start(starting, "replicas", {"CPU": num_cpus, "GPU": num_gpus}, start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @staticmethod
    def find(name: str) -> NamedModelFleet:
        """Find a fleet that somebody has started in this cluster.

        Raises:
            EndpointUnreachableError: There is none of that name.
        """
        fleet = NamedModelFleet(name)
        fleet._record()
        return fleet

    def stop(self) -> None:
        """End all replicas at once; ``drain`` first to spare the sessions. Idempotent."""
        replicas, self._replicas = self._replicas, []
        if not replicas:
            return
        for endpoint_id in self._endpoint_ids:
            self._registry.withdraw.remote(endpoint_id)
        for actor in (*replicas, self._kept):
            ray.kill(actor)
        _await_free(self.name, ("", *self._endpoint_ids))

    def __reduce__(self) -> tuple[Any, ...]:
        return (NamedModelFleet, (self.name,))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def _places(num_replicas: int, addresses: Sequence[str] | None) -> list[str | None]:
    """Return where each replica listens; None: it chooses."""
    if num_replicas < 1:
        raise ConfigurationError(f"num_replicas={num_replicas} must be at least 1")
    if addresses is None:
        return [None] * num_replicas
    if isinstance(addresses, str) or len(addresses) != num_replicas:
        raise ConfigurationError(
            f"addresses={addresses!r} must be a list of {num_replicas}, one a replica"
        )
    if len(set(addresses)) < num_replicas:
        raise ConfigurationError(
            f"addresses={list(addresses)!r}: each replica needs a port of its own; leave addresses "
            "out, and every replica takes a free one"
        )
    return list(addresses)


def _start_store(name: str, record: FleetRecord) -> Any:
    try:
        return start_weight_store(actor_name(name), record)
    except ValueError as error:
        raise ConfigurationError(
            f"a model fleet called {name!r} runs in this cluster; choose another name, or use that "
            f"one: ModelFleet.find({name!r})"
        ) from error


def _await_free(fleet: str, endpoint_ids: Sequence[str]) -> None:
    """Wait until the actors' names can be used again: Ray ends actors in its own time."""
    deadline_s = time.monotonic() + _NAME_TIMEOUT_S
    for endpoint_id in endpoint_ids:
        while time.monotonic() < deadline_s:
            try:
                find_actor(fleet, endpoint_id)
            except EndpointUnreachableError:
                break
            time.sleep(POLL_S)
