"""Where a fleet's endpoints are to run: from what users say to the options of Ray's actors."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.errors import ConfigurationError

ActorOptions = Mapping[str, Any] | Sequence[Mapping[str, Any]]
"""Options of Ray's actors: for all endpoints, or one mapping for each."""

# Whoever gives one of these says more precisely where endpoints may be.
_PLACES = {"scheduling_strategy", "label_selector", "resources"}


@dataclass(frozen=True, slots=True)
class Placement:
    """Says where the endpoint at each index of a fleet goes. Make one with ``of``."""

    num_cpus: float
    where: str | tuple[str, ...]
    options: tuple[Mapping[str, Any], ...]
    """At least one; repeated where the fleet has more endpoints."""

    @classmethod
    def of(
        cls,
        where: str | Sequence[str],
        num_cpus: float,
        options: ActorOptions | None,
        num_endpoints: int,
        nodes: Collection[str],
    ) -> Self:
        """Check what the user has said.

        Args:
            where: ``"near"``, ``"spread"``, or node ids.
            num_cpus: Of each endpoint.
            options: Further ones.
            num_endpoints: How many mappings ``options`` has to have, if it is a sequence.
            nodes: Ids of the nodes that are alive.

        Raises:
            ConfigurationError: Something of it cannot be.
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
        if isinstance(where, str):
            if where not in {"near", "spread"}:
                raise ConfigurationError(
                    f"placement={where!r} is neither 'near' nor 'spread' nor a list of node ids"
                )
            return cls(num_cpus, where, each)
        if not isinstance(where, Sequence):
            raise ConfigurationError(
                f"placement={where!r} is neither 'near' nor 'spread' nor a list of node ids"
            )
        unknown = sorted(set(where) - set(nodes))
        if unknown or not where:
            raise ConfigurationError(
                f"placement={list(where)!r}: {', '.join(unknown) or 'an empty list'} names no node "
                f"that is alive; the cluster has: {', '.join(sorted(nodes))}"
            )
        return cls(num_cpus, tuple(where), each)

    def options_of(self, index: int) -> dict[str, Any]:
        """Return the options of the actor of the endpoint at ``index``."""
        given = self.options[index % len(self.options)]
        # DEFAULT: not into the placement group of whoever happens to start the fleet.
        strategy: Any = "SPREAD" if self.where == "spread" else "DEFAULT"
        if not isinstance(self.where, str):
            # Soft: when the node is lost, its endpoints go elsewhere.
            node_id = self.where[index % len(self.where)]
            strategy = NodeAffinitySchedulingStrategy(node_id, soft=True)
        return {"num_cpus": self.num_cpus, "scheduling_strategy": strategy, **given}

    def is_near(self, index: int) -> bool:
        """Return whether the endpoint at ``index`` is brought to the runner that claims it."""
        given = self.options[index % len(self.options)]
        return self.where == "near" and not _PLACES.intersection(given)


def checked_addresses(
    addresses: Sequence[str] | None, num_endpoints: int
) -> tuple[str, ...] | None:
    """Return where each endpoint is to listen; None: it chooses.

    Raises:
        ConfigurationError: ``addresses`` are not one for each.
    """
    if addresses is None:
        return None
    if isinstance(addresses, str) or len(addresses) != num_endpoints:
        raise ConfigurationError(
            f"addresses={addresses!r} must be a list of {num_endpoints}, one an endpoint"
        )
    if len(set(addresses)) < num_endpoints:
        raise ConfigurationError(
            f"addresses={list(addresses)!r}: each endpoint needs a port of its own; leave "
            "addresses out, and every endpoint takes a free one"
        )
    return tuple(addresses)
