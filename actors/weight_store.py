"""Where a policy's newest weights live while those who act with them come and go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE
from rlmesh_ray.errors import ConfigurationError, EndpointUnreachableError
from rlmesh_ray.server.model_options import checked_version, version_after


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """One version of a policy's weights."""

    version: int
    reference: Any
    """ObjectRef of the weights. The keeper owns the object: it outlives whoever trained."""


@dataclass(frozen=True, slots=True)
class FleetRecord:
    """What whoever finds a fleet by its name needs to know of it."""

    endpoint_ids: tuple[str, ...]
    token: str = field(repr=False)


class WeightStore:
    """Holds the weights that all replicas act with, and for a moment those offered to them.

    Weights are offered, tried by the replicas, and then either accepted, which frees the former
    ones, or rejected. A replica that starts takes the newest that it can.

    Args:
        record: Of the fleet that it serves; None for a single actor.
    """

    def __init__(self, record: FleetRecord | None = None) -> None:
        self._record = record
        self._accepted: StoredWeights | None = None
        self._offered: StoredWeights | None = None
        self._last_version = 0

    def record(self) -> FleetRecord | None:
        """Return what the keeper was made with."""
        return self._record

    def accepted_version(self) -> int:
        """Return the version that every replica acts with, or a newer one; 0 at first."""
        return self._accepted.version if self._accepted else 0

    def offer(
        self, version: int | None, floor: int, names: Sequence[Any] | None, *parts: object
    ) -> int:
        """Take weights that have not been tried yet; they take the place of others like that.

        Args:
            version: Their version, an integer from 1 to 2**63 - 1; None: the next one.
            floor: The newest version that somebody is known to act with.
            names: Keys of the mapping that ``parts`` are the values of; None: one part, alone.
            parts: Arguments of their own, so that Ray fetches those that are references.

        Returns:
            The version.

        Raises:
            ConfigurationError: ``version`` is no such integer, or not newer than the accepted one.
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
        """Keep an offer in place of what was accepted before, unless a newer offer came."""
        if self._offered is not None and self._offered.version == version:
            self._accepted, self._offered = self._offered, None

    def reject(self, version: int) -> None:
        """Forget an offer."""
        if self._offered is not None and self._offered.version == version:
            self._offered = None

    def newest(self) -> list[StoredWeights]:
        """Return what there is, newest first: at most an offer and what was accepted."""
        return [stored for stored in (self._offered, self._accepted) if stored is not None]


def offer(store: Any, weights: object, version: int | None, floor: int = 0) -> Any:
    """Offer weights to a keeper; return the reference of its answer.

    Args:
        store: Handle of the ``WeightStore`` actor.
        weights: The weights, a reference to them, or a mapping of which some values are
            references.
        version: See ``WeightStore.offer``.
        floor: See ``WeightStore.offer``.
    """
    if isinstance(weights, Mapping):
        return store.offer.remote(version, floor, list(weights), *weights.values())
    return store.offer.remote(version, floor, None, weights)


def start_weight_store(name: str, record: FleetRecord | None = None) -> Any:
    """Start a keeper; it lives as long as the handle that this returns.

    Args:
        name: Under which ``find_weight_store`` finds it.
        record: See ``WeightStore``.

    Raises:
        ValueError: There is an actor of that name.
    """
    return (
        ray.remote(WeightStore)
        .options(
            name=name,
            namespace=REGISTRY_NAMESPACE,
            num_cpus=0,
            max_restarts=-1,
            # Whatever is asked of it can be asked twice.
            max_task_retries=-1,
            scheduling_strategy="DEFAULT",
        )
        .remote(record)
    )


def find_weight_store(name: str) -> Any:
    """Return the keeper of that name.

    Raises:
        EndpointUnreachableError: There is none.
    """
    try:
        return ray.get_actor(name, namespace=REGISTRY_NAMESPACE)
    except ValueError as error:
        raise EndpointUnreachableError(
            "the actor that kept the policy's weights has ended, because nobody held the fleet, or "
            "the handle of a single ModelServiceActor, any more; start anew"
        ) from error
