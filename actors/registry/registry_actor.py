"""EndpointRegistry: the actor with the leases of endpoints and the assignments of sessions.

A cluster has one registry. It outlives the driver that started it: other drivers may use it, too,
and endpoints that restart must find it. After a restart by Ray it is empty; the heartbeats of
endpoints and the ``rebalance`` calls of runners fill it again.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from rlmesh_ray.actors.placement import ON_HEAD
from rlmesh_ray.actors.ray_calls import is_restarted
from rlmesh_ray.actors.registry.assignment_table import AssignmentTable, EndpointRecord
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, RunnerStatus
from rlmesh_ray.server.observe.statistics import StatisticsPair

REGISTRY_NAME = "registry"
REGISTRY_NAMESPACE = "rlmesh_ray"
DEFAULT_LEASE_S = 15.0
_FORGET_AFTER_S = 600.0
"""Time after the end of a lease during which the endpoint is known, and shown as stale."""


@dataclass(slots=True)
class _Lease:
    record: EndpointRecord
    lease_s: float
    renewed_s: float
    is_suspended: bool = False
    is_retiring: bool = False
    sighting: StatisticsPair | None = None
    """Its last statistics."""

    def left_s(self, now_s: float) -> float:
        return self.renewed_s + self.lease_s - now_s

    def is_live(self, now_s: float) -> bool:
        return not self.is_suspended and self.left_s(now_s) > 0


class EndpointRegistry:
    """The leases of the cluster's endpoints, by id and by fleet, and each fleet's assignments.

    An endpoint's id stays the same over restarts; its incarnation counts them, so that an old
    address is never taken for the new one. Each incarnation holds a lease, which its heartbeats
    renew; look-ups do not return an endpoint whose lease has expired.

    Args:
        clock: Returns the time of one monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._assignments: dict[str, AssignmentTable] = {}
        # After a restart an unknown endpoint may be gone, or its heartbeat may yet come.
        self._rebalances_from_s = clock() + (DEFAULT_LEASE_S if is_restarted() else 0.0)
        # In the order of the ids' first announcements.
        self._entries: dict[str, _Lease] = {}
        # Incarnations of withdrawn endpoints, and when to drop them.
        self._former: dict[str, tuple[int, float]] = {}

    def announce(
        self,
        endpoint_id: str,
        address: str,
        fleet: str = "",
        node_id: str = "",
        lease_s: float = DEFAULT_LEASE_S,
    ) -> int:
        """Enter a new incarnation of an endpoint, in place of a former one; return its number.

        Without a ``renew`` the lease lasts ``lease_s``, which may be infinite. ``fleet`` is empty
        for an endpoint without a fleet, ``node_id`` for one outside of the cluster.
        """
        self._sweep()
        entry = self._entries.get(endpoint_id)
        former, _ = self._former.pop(endpoint_id, (0, 0.0))
        incarnation = (entry.record.incarnation if entry else former) + 1
        self._enter(EndpointRecord(endpoint_id, incarnation, address, fleet, node_id), lease_s)
        return incarnation

    def resume(self, record: EndpointRecord) -> bool:
        """Enter an incarnation again; False: another one holds the id, or it was withdrawn."""
        if record.endpoint_id in self._former:
            return False
        entry, now_s = self._entries.get(record.endpoint_id), self._clock()
        if entry is not None and entry.record == record:
            entry.renewed_s = now_s
            return True
        # After a restart of the registry incarnations count from 1 again: only an expired lease
        # proves that the entry is the older one.
        if entry is not None and (
            entry.record.incarnation >= record.incarnation or entry.left_s(now_s) > 0
        ):
            return False
        self._enter(record, DEFAULT_LEASE_S)
        return True

    def renew(
        self, endpoint_id: str, incarnation: int, sighting: StatisticsPair | None = None
    ) -> bool:
        """Renew a lease; False: the endpoint is not known, or another incarnation holds the id."""
        entry = self._entries.get(endpoint_id)
        if entry is None or entry.record.incarnation != incarnation:
            return False
        entry.renewed_s = self._clock()
        if sighting is not None:
            entry.sighting = sighting
        return True

    def lookup(self, endpoint_id: str) -> EndpointRecord | None:
        """Return the newest record of an endpoint; None if it is stale or suspended."""
        entry = self._entries.get(endpoint_id)
        return entry.record if entry and entry.is_live(self._clock()) else None

    def members(self, fleet: str) -> tuple[EndpointRecord, ...]:
        """Return the endpoints of a fleet that accept sessions, in a stable order."""
        now_s = self._clock()
        return tuple(
            entry.record
            for entry in self._entries.values()
            if entry.record.fleet == fleet and not entry.is_retiring and entry.is_live(now_s)
        )

    def retire(self, endpoint_id: str) -> None:
        """Exclude an endpoint from ``members``, also after a restart of it."""
        if endpoint_id in self._entries:
            self._entries[endpoint_id].is_retiring = True

    def suspend(self, endpoint_id: str) -> None:
        """Exclude an endpoint from look-ups until it is announced again."""
        if endpoint_id in self._entries:
            self._entries[endpoint_id].is_suspended = True

    def withdraw(self, endpoint_id: str, incarnation: int | None = None) -> None:
        """Remove an endpoint that has ended, if ``incarnation`` (None: any) holds its id."""
        entry = self._entries.get(endpoint_id)
        if entry is None or incarnation not in {None, entry.record.incarnation}:
            return
        del self._entries[endpoint_id]
        # Its last heartbeat may still be on its way, and must not enter it again.
        self._former[endpoint_id] = (entry.record.incarnation, self._clock() + _FORGET_AFTER_S)

    def assign(
        self,
        fleet: str,
        session: str,
        wanted: str,
        node_id: str = "",
        reserved: Collection[str] = (),
    ) -> EndpointRecord | None:
        now_s = self._clock()
        for each in [name for name, it in self._assignments.items() if it.is_forgotten(now_s)]:
            del self._assignments[each]
        table = self._assignments.setdefault(fleet, AssignmentTable())
        return table.assign(session, wanted, node_id, self.members(fleet), reserved, now_s)

    def rebalance(
        self, fleet: str, placed: Mapping[str, str], reserved: Collection[str] = ()
    ) -> tuple[str, ...]:
        now_s = self._clock()
        table = self._assignments.setdefault(fleet, AssignmentTable())
        members = self.members(fleet) if now_s >= self._rebalances_from_s else ()
        return table.rebalance(placed, members, reserved, now_s)

    def release(self, fleet: str, sessions: Iterable[str]) -> None:
        if fleet in self._assignments:
            self._assignments[fleet].release(sessions)

    def overview(self) -> tuple[EndpointStatus, ...]:
        """Return the status of all endpoints, with the ids of their nodes."""
        self._sweep()
        now_s = self._clock()
        counts = {fleet: table.session_counts for fleet, table in self._assignments.items()}
        return tuple(
            EndpointStatus(
                fleet=record.fleet,
                endpoint_id=record.endpoint_id,
                node=record.node_id,
                address=record.address,
                restarts=record.incarnation - 1,
                lease_left_s=entry.left_s(now_s),
                is_retiring=entry.is_retiring,
                num_assigned=counts.get(record.fleet, Counter())[record.endpoint_id],
                sighting=entry.sighting,
            )
            for entry in self._entries.values()
            for record in (entry.record,)
        )

    def runners(self) -> list[RunnerStatus]:
        """Return the env runners of all fleets, with the ids of their nodes."""
        now_s = self._clock()
        return [
            each
            for fleet, table in sorted(self._assignments.items())
            for each in table.runners(fleet, now_s)
        ]

    def _enter(self, record: EndpointRecord, lease_s: float) -> None:
        former = self._entries.get(record.endpoint_id)
        self._entries[record.endpoint_id] = _Lease(
            record, lease_s, self._clock(), is_retiring=bool(former and former.is_retiring)
        )

    def _sweep(self) -> None:
        """Drop endpoints long after their leases have expired."""
        now_s = self._clock()
        self._entries = {
            name: each
            for name, each in self._entries.items()
            if each.left_s(now_s) >= -_FORGET_AFTER_S
        }
        self._former = {name: each for name, each in self._former.items() if each[1] >= now_s}


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
            **ON_HEAD,
        )
        .remote()
    )


def find_registry() -> Any:
    """Return the registry actor of the cluster; ValueError: there is none."""
    return find_actor(REGISTRY_NAME)


def find_actor(name: str) -> Any:
    """Return an actor of this package, from any namespace; ValueError: there is none."""
    return ray.get_actor(name, namespace=REGISTRY_NAMESPACE)
