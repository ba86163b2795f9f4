"""Placement of a fleet's endpoints on nodes, as options of Ray actors."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, Self

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.errors import ConfigurationError

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Options of Ray actors: one mapping for all endpoints, or one for each."""

# Options that name nodes more precisely than "near" does.
_PLACES = {"scheduling_strategy", "label_selector", "resources"}


@dataclass(frozen=True, slots=True)
class Placement:
    """The node choice of each endpoint of a fleet, by index. Make one with ``of``."""

    resources: Mapping[str, float]
    """``num_cpus`` and ``num_gpus`` of each endpoint."""
    where: str | tuple[str, ...]
    options: tuple[Mapping[str, Any], ...]
    """At least one; repeated where the fleet has more endpoints."""

    @classmethod
    def of(
        cls,
        where: str | Sequence[str],
        resources: Mapping[str, float],
        options: ActorOptions | None,
        num_endpoints: int,
        nodes: Collection[str],
    ) -> Self:
        """Return the placement of a fleet, if its options are valid.

        Args:
            where: ``"near"``, ``"spread"``, or node ids.
            resources: ``num_cpus`` and ``num_gpus`` of each endpoint.
            options: Further options of the actors.
            num_endpoints: Number of mappings in ``options``, if it is a sequence.
            nodes: Ids of the nodes that are alive.

        Raises:
            ConfigurationError: ``where`` names no node, or ``options`` are not one for each.
        """
        if isinstance(options, Mapping) or options is None:
            each: tuple[Mapping[str, Any], ...] = (options or {},)
        else:
            each = tuple(options)
            if len(each) != num_endpoints:
                raise ConfigurationError(
                    f"actor_options has {len(each)} mappings for {num_endpoints} endpoints; give "
                    "one for each, or a single mapping for all of them"
                )
        if isinstance(where, str) and where in {"near", "spread"}:
            return cls(resources, where, each)
        if isinstance(where, str) or not isinstance(where, Sequence):
            raise ConfigurationError(
                f"placement={where!r} is neither 'near' nor 'spread' nor a list of node ids"
            )
        unknown = sorted(set(where) - set(nodes))
        if unknown or not where:
            raise ConfigurationError(
                f"placement={list(where)!r}: {', '.join(unknown) or 'an empty list'} names no node "
                f"that is alive; the cluster has: {', '.join(sorted(nodes))}"
            )
        return cls(resources, tuple(where), each)

    def options_of(self, index: int) -> dict[str, Any]:
        """Return Ray's options for the actor of the endpoint at ``index``."""
        given = self.options[index % len(self.options)]
        # DEFAULT: not in the placement group of the caller.
        strategy: Any = "SPREAD" if self.where == "spread" else "DEFAULT"
        if not isinstance(self.where, str):
            # Soft: when the node is lost, its endpoints restart elsewhere.
            node_id = self.where[index % len(self.where)]
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        return {**self.resources, "scheduling_strategy": strategy, **given}

    def is_near(self, index: int) -> bool:
        """Return whether the endpoint at ``index`` moves to the node of its first runner."""
        given = self.options[index % len(self.options)]
        return self.where == "near" and not _PLACES.intersection(given)


def require_resources(
    actor_options: object, *, is_per_endpoint: bool = False, **amounts: object
) -> None:
    """Require that the resources and options of a fleet's actors are such as Ray takes.

    Args:
        actor_options: A mapping, or None.
        is_per_endpoint: Whether ``actor_options`` may also be a list of mappings.
        amounts: ``num_cpus`` and ``num_gpus``.

    Raises:
        ConfigurationError: One of them is not.
    """
    for name, amount in amounts.items():
        if (
            isinstance(amount, bool)
            or not isinstance(amount, Real)
            or not 0 <= float(amount) < math.inf
        ):
            raise ConfigurationError(f"{name}={amount!r:.40} must be a number, 0 or more")
    each = actor_options if is_per_endpoint and isinstance(actor_options, (list, tuple)) else None
    for options in (actor_options,) if each is None else each:
        if not isinstance(options, (Mapping, NoneType)):
            raise ConfigurationError(
                f"actor_options={actor_options!r:.40} must be a mapping of Ray's options"
            )


def checked_addresses(
    addresses: Sequence[str] | None, count: int, what: str
) -> tuple[str, ...] | None:
    """Return the addresses that a fleet's actors listen on; None: each chooses a free port.

    Args:
        addresses: As the caller gave them.
        count: Number of actors.
        what: Name of one of them, for error messages.

    Raises:
        ConfigurationError: ``addresses`` are not one for each.
    """
    if addresses is None:
        return None
    if isinstance(addresses, str) or len(addresses) != count:
        raise ConfigurationError(
            f"addresses={addresses!r} must be a list of {count}, one for each {what}"
        )
    if len(set(addresses)) < count:
        raise ConfigurationError(
            f"addresses={list(addresses)!r}: each {what} needs a port of its own; leave addresses "
            f"out, and every {what} takes a free one"
        )
    return tuple(addresses)
