"""EndpointRegistry: the actor with the leases of endpoints and the assignments of sessions.

A cluster has one registry. It outlives the driver that started it: other drivers may use it, too,
and endpoints that restart must find it. After a restart by Ray it is empty; the heartbeats of
endpoints and the ``rebalance`` calls of runners fill it again.
"""

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import ray

from rlmesh_ray.actors.ray_calls import is_restarted
from rlmesh_ray.actors.registry.assignment_table import AssignmentTable
from rlmesh_ray.actors.registry.lease_table import DEFAULT_LEASE_S, EndpointRecord, LeaseTable
from rlmesh_ray.server.endpoint_status import EndpointStatus, RunnerStatus

REGISTRY_NAME = "registry"
REGISTRY_NAMESPACE = "rlmesh_ray"


class EndpointRegistry(LeaseTable):
    """The leases of the cluster's endpoints, and the assignment table of each fleet."""

    def __init__(self) -> None:
        super().__init__()
        self._assignments: dict[str, AssignmentTable] = {}
        # After a restart an unknown endpoint may be gone, or its heartbeat may yet come.
        self._rebalances_from_s = time.monotonic() + (DEFAULT_LEASE_S if is_restarted() else 0.0)

    def assign(
        self,
        fleet: str,
        session: str,
        wanted: str,
        node_id: str = "",
        reserved: Collection[str] = (),
    ) -> EndpointRecord | None:
        now_s = time.monotonic()
        for each in [name for name, it in self._assignments.items() if it.is_forgotten(now_s)]:
            del self._assignments[each]
        table = self._assignments.setdefault(fleet, AssignmentTable())
        return table.assign(session, wanted, node_id, self.members(fleet), reserved, now_s)

    def rebalance(
        self, fleet: str, placed: Mapping[str, str], reserved: Collection[str] = ()
    ) -> tuple[str, ...]:
        now_s = time.monotonic()
        table = self._assignments.setdefault(fleet, AssignmentTable())
        members = self.members(fleet) if now_s >= self._rebalances_from_s else ()
        return table.rebalance(placed, members, reserved, now_s)

    def release(self, fleet: str, sessions: Iterable[str]) -> None:
        table = self._assignments.get(fleet)
        if table is None:
            return
        table.release(sessions)
        if not table.session_counts:
            del self._assignments[fleet]

    def overview(self) -> tuple[EndpointStatus, ...]:
        """Return the status of all endpoints, with the ids of their nodes."""
        session_counts = {fleet: table.session_counts for fleet, table in self._assignments.items()}
        return tuple(self.entries(session_counts))

    def runners(self) -> list[RunnerStatus]:
        """Return the env runners of all fleets, with the ids of their nodes."""
        now_s = time.monotonic()
        return [
            each
            for fleet, table in sorted(self._assignments.items())
            for each in table.runners(fleet, now_s)
        ]


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
            # All its methods are idempotent.
            max_task_retries=-1,
            # The loss of any other node would end all fleets, but not the cluster.
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
