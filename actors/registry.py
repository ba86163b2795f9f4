"""Where endpoints are: looked up by id, never computed.

An endpoint announces itself each time it starts. Its id stays the same over restarts, its
incarnation counts them, so that an old address is never taken for the new one's.

There is one registry a cluster. It outlives the driver that needed it first: other drivers
may know it too, and endpoints that restart must find it.
"""

from dataclasses import dataclass
from typing import Any

import ray

REGISTRY_NAME = "registry"
REGISTRY_NAMESPACE = "rlmesh_ray"


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """What the registry knows of an endpoint."""

    endpoint_id: str
    incarnation: int
    """1 for the first start."""
    address: str


class EndpointRegistry:
    """The records, by endpoint id."""

    def __init__(self) -> None:
        self._records: dict[str, EndpointRecord] = {}
        self._incarnations: dict[str, int] = {}

    def announce(self, endpoint_id: str, address: str) -> int:
        """Record that an endpoint serves at ``address``; return its incarnation."""
        incarnation = self._incarnations.get(endpoint_id, 0) + 1
        self._incarnations[endpoint_id] = incarnation
        self._records[endpoint_id] = EndpointRecord(endpoint_id, incarnation, address)
        return incarnation

    def lookup(self, endpoint_id: str) -> EndpointRecord | None:
        """Return the newest record of an endpoint; None when there is none."""
        return self._records.get(endpoint_id)

    def suspend(self, endpoint_id: str) -> None:
        """Send nobody to an endpoint any more, until it announces itself again."""
        self._records.pop(endpoint_id, None)

    def withdraw(self, endpoint_id: str) -> None:
        """Forget an endpoint that has been ended for good."""
        self._records.pop(endpoint_id, None)
        self._incarnations.pop(endpoint_id, None)


def shared_registry() -> Any:
    """Return the registry actor of the cluster; the first call starts it."""
    return (
        ray.remote(EndpointRegistry)
        .options(
            name=REGISTRY_NAME,
            namespace=REGISTRY_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            # Any other node can be lost without the cluster, and would take all fleets along.
            resources={"node:__internal_head__": 0.001},
        )
        .remote()
    )


def find_registry() -> Any:
    """Return the registry actor of the cluster.

    Raises:
        ValueError: There is none; no fleet has been started.
    """
    return ray.get_actor(REGISTRY_NAME, namespace=REGISTRY_NAMESPACE)
