"""WeightStore: the actor that holds a policy's newest weights while replicas restart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError
from rlmesh_ray.server.model.model_options import checked_version, version_after


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """One version of a policy's weights."""

    version: int
    reference: Any
    """ObjectRef of the weights. The store owns the object, which outlives the training."""


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """Endpoint ids and token of a fleet, for programs that find it by its name."""

    endpoint_ids: tuple[str, ...]
    token: TokenSource = field(repr=False)


class WeightStore:
    """Holds the accepted weights of a policy, and those that are on offer.

    Weights are offered, tried by the replicas, and then either accepted, which frees the former
    ones, or rejected. A replica that starts loads the newest that its policy accepts.

    Args:
        record: Record of the fleet; None for a single actor.
    """

    def __init__(self, record: FleetRecord | None = None) -> None:
        self._record = record
        self._accepted: StoredWeights | None = None
        self._offered: StoredWeights | None = None
        self._last_version = 0

    def record(self) -> FleetRecord | None:
        return self._record

    def accepted_version(self) -> int:
        """Return the version of the accepted weights; 0 at first."""
        return self._accepted.version if self._accepted else 0

    def offer(
        self, version: int | None, floor: int, names: Sequence[Any] | None, *parts: object
    ) -> int:
        """Store weights as the present offer, in place of a former offer.

        Args:
            version: Version of the weights, an integer from 1 to 2**63 - 1; None: the next one.
            floor: The newest version that a replica is known to act with.
            names: Keys of the mapping whose values ``parts`` are; None: ``parts`` is one object.
            parts: Separate arguments, so that Ray resolves those that are references.

        Returns:
            The version.

        Raises:
            ConfigurationError: ``version`` is invalid, or not newer than the accepted one.
        """
        floor = max(floor, self.accepted_version())
        if version is None:
            version = version_after(max(floor, self._last_version))
        else:
            version = checked_version(version)
        if version <= floor:
            raise ConfigurationError(
                f"version {version} is not newer than {floor}, which the policy acts with: "
                "versions only grow; leave the version out to get the next one"
            )
        self._last_version = max(self._last_version, version)
        weights = parts[0] if names is None else dict(zip(names, parts, strict=True))
        self._offered = StoredWeights(version, ray.put(weights))
        return version

    def accept(self, version: int) -> None:
        """Accept an offer, unless a newer one has replaced it."""
        if self._offered is not None and self._offered.version == version:
            self._accepted, self._offered = self._offered, None

    def reject(self, version: int) -> None:
        if self._offered is not None and self._offered.version == version:
            self._offered = None

    def newest(self) -> list[StoredWeights]:
        """Return the offer and the accepted weights, as far as there are any, in that order."""
        return [stored for stored in (self._offered, self._accepted) if stored is not None]


def offer(store: Any, weights: object, version: int | None, floor: int = 0) -> Any:
    """Offer weights to a store; return the reference of its answer, the version.

    Args:
        store: Handle of the ``WeightStore`` actor.
        weights: The weights, an object reference to them, or a mapping with references as
            values.
        version: See ``WeightStore.offer``.
        floor: See ``WeightStore.offer``.
    """
    if isinstance(weights, Mapping):
        return store.offer.remote(version, floor, list(weights), *weights.values())
    return store.offer.remote(version, floor, None, weights)


def start_weight_store(name: str, record: FleetRecord | None = None) -> Any:
    """Start a weight store; it lives as long as the handle that this returns.

    Args:
        name: Name of the actor, for ``find_weight_store``.
        record: See ``WeightStore``.

    Raises:
        ValueError: The cluster has an actor of that name.
    """
    return (
        ray.remote(WeightStore)
        .options(
            name=name,
            namespace=REGISTRY_NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            # All its methods are idempotent.
            max_task_retries=-1,
            scheduling_strategy="DEFAULT",
        )
        .remote(record)
    )


def find_weight_store(name: str) -> Any:
    """Return the weight store of that name.

    Raises:
        EndpointUnreachableError: There is none.
    """
    try:
        return ray.get_actor(name, namespace=REGISTRY_NAMESPACE)
    except ValueError as error:
        raise EndpointUnreachableError(
            "the actor that stored the policy's weights has ended, because no program holds the "
            "fleet, or the handle of a single ModelServiceActor, any more; start the fleet again"
        ) from error
