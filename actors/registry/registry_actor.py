"""Where endpoints are, and which session goes where: looked up in an actor, never computed.

There is one registry a cluster. It outlives the driver that needed it first: other drivers
may know it too, and endpoints that restart must find it. If Ray restarts it, it is empty, and
what it needs to know comes back with the heartbeats of endpoints and the surveys of runners.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import ray

from rlmesh_ray.actors.actor_restart import is_restarted
from rlmesh_ray.actors.registry.lease_table import (
    DEFAULT_LEASE_S,
    EndpointOverview,
    EndpointRecord,
    LeaseTable,
)
from rlmesh_ray.actors.registry.session_assignment import AssignmentTable

REGISTRY_NAME = "registry"
REGISTRY_NAMESPACE = "rlmesh_ray"


class EndpointRegistry:
    """The ledger of the cluster's endpoints, and the seating of each fleet."""

    def __init__(self) -> None:
        self._leases = LeaseTable()
        self._assignments: dict[str, AssignmentTable] = {}
        # One that has been restarted does not know yet who has vanished, and who will be heard of.
        self._rebalances_from_s = time.monotonic() + (DEFAULT_LEASE_S if is_restarted() else 0.0)

    def announce(
        self,
        endpoint_id: str,
        address: str,
        fleet: str = "",
        node_id: str = "",
        lease_s: float = DEFAULT_LEASE_S,
    ) -> int:
        """Record that an endpoint has been started and serves at ``address``.

        Args:
            endpoint_id: Which; whoever held the id before does so no longer.
            address: ``HOST:PORT``.
            fleet: Whose it is.
            node_id: Where it is; empty: on no node of the cluster.
            lease_s: For how long that can be relied on without a ``renew``; may be infinite.

        Returns:
            Its incarnation.
        """
        now_s = time.monotonic()
        for each in [name for name, it in self._assignments.items() if it.is_forgotten(now_s)]:
            del self._assignments[each]
        return self._leases.announce(endpoint_id, address, fleet, node_id, lease_s, now_s)

    def resume(self, record: EndpointRecord, lease_s: float = DEFAULT_LEASE_S) -> bool:
        """Take back an incarnation whose ``renew`` has failed; False: it has been superseded."""
        return self._leases.resume(record, lease_s, time.monotonic())

    def renew(self, endpoint_id: str, incarnation: int, statistics: object = None) -> bool:
        """Renew an endpoint's lease; False: it is unknown, or another incarnation holds the id."""
        return self._leases.renew(endpoint_id, incarnation, time.monotonic(), statistics)

    def lookup(self, endpoint_id: str) -> EndpointRecord | None:
        """Return the newest record of an endpoint; None when nobody may be sent there."""
        return self._leases.lookup(endpoint_id, time.monotonic())

    def members(self, fleet: str) -> tuple[EndpointRecord, ...]:
        """Return a fleet's endpoints that may get sessions, in the order they came in."""
        return self._leases.members(fleet, time.monotonic())

    def retire(self, endpoint_id: str) -> None:
        """Give an endpoint no new sessions, and have those that it has move."""
        self._leases.retire(endpoint_id)

    def suspend(self, endpoint_id: str) -> None:
        """Send nobody to an endpoint any more, until it announces itself again."""
        self._leases.suspend(endpoint_id)

    def withdraw(self, endpoint_id: str, incarnation: int | None = None) -> None:
        """Strike an endpoint that has been ended for good; see ``LeaseTable.withdraw``."""
        self._leases.withdraw(endpoint_id, time.monotonic(), incarnation)

    def assign(
        self,
        fleet: str,
        session: str,
        wanted: str,
        node_id: str = "",
        reserved: Collection[str] = (),
    ) -> EndpointRecord | None:
        """Give a session a seat at an endpoint of a fleet; see ``AssignmentTable.assign``."""
        now_s = time.monotonic()
        table = self._assignments.setdefault(fleet, AssignmentTable())
        members = self._leases.members(fleet, now_s)
        return table.assign(session, wanted, node_id, members, reserved, now_s)

    def rebalance(
        self, fleet: str, placed: Mapping[str, str], reserved: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Return which of a runner's sessions shall move; see ``AssignmentTable.rebalance``."""
        now_s = time.monotonic()
        table = self._assignments.setdefault(fleet, AssignmentTable())
        members = self._leases.members(fleet, now_s) if now_s >= self._rebalances_from_s else ()
        return table.rebalance(placed, members, reserved, now_s)

    def release(self, fleet: str, sessions: Iterable[str]) -> None:
        """Forget sessions that have ended."""
        table = self._assignments.get(fleet)
        if table is None:
            return
        table.release(sessions)
        if not table.session_counts:
            del self._assignments[fleet]

    def overview(self) -> tuple[EndpointOverview, ...]:
        """Return what is known of every endpoint, also of those that are stale."""
        session_counts = {fleet: table.session_counts for fleet, table in self._assignments.items()}
        return tuple(
            replace(each, num_assigned=session_counts[each.record.fleet][each.record.endpoint_id])
            if each.record.fleet in session_counts
            else each
            for each in self._leases.entries(time.monotonic())
        )


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
            max_restarts=-1,
            # Whatever is asked of it can be asked twice.
            max_task_retries=-1,
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
