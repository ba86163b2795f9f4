"""Lease table of the endpoints of a cluster. No I/O: the clock is passed in.

An endpoint's id stays the same over restarts; its incarnation counts them, so that an old address
is never taken for the new one. Each incarnation holds a lease, which its heartbeats renew; look-ups
do not return an endpoint whose lease has expired.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rlmesh_ray.server.endpoint_status import EndpointStatus
from rlmesh_ray.server.statistics import StatisticsPair

DEFAULT_LEASE_S = 15.0
_FORGET_AFTER_S = 600.0
"""Time after the end of a lease during which the endpoint is known, and shown as stale."""


@dataclass(frozen=True, slots=True)
class EndpointRecord:
    """The registration of one incarnation of an endpoint."""

    endpoint_id: str
    incarnation: int
    """1 for the first start."""
    address: str
    fleet: str = ""
    node_id: str = ""
    """Node of the cluster; empty: outside of the cluster."""


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


class LeaseTable:
    """Leases by endpoint id and by fleet.

    Args:
        clock: Returns the time of one monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Both in the order of the ids' first announcements.
        self._entries: dict[str, _Lease] = {}
        self._fleets: dict[str, dict[str, _Lease]] = {}
        # Incarnations of withdrawn endpoints, and when to drop them.
        self._former: dict[str, tuple[int, float]] = {}
        self._next_sweep_s = 0.0

    def announce(
        self,
        endpoint_id: str,
        address: str,
        fleet: str = "",
        node_id: str = "",
        lease_s: float = DEFAULT_LEASE_S,
    ) -> int:
        """Enter a new incarnation of an endpoint, which serves at ``address``.

        Args:
            endpoint_id: Id of the endpoint; a former incarnation no longer holds it.
            address: ``HOST:PORT``.
            fleet: Name of the endpoint's fleet; empty: none.
            node_id: Node of the endpoint; empty: outside of the cluster.
            lease_s: How long the lease lasts without a ``renew``; may be infinite.

        Returns:
            The incarnation.
        """
        self._sweep()
        entry = self._entries.get(endpoint_id)
        former, _ = self._former.pop(endpoint_id, (0, 0.0))
        incarnation = (entry.record.incarnation if entry else former) + 1
        self._enter(EndpointRecord(endpoint_id, incarnation, address, fleet, node_id), lease_s)
        return incarnation

    def resume(self, record: EndpointRecord) -> bool:
        """Enter a known incarnation again after a failed ``renew``.

        Returns:
            False if another incarnation holds the id, or the endpoint has been withdrawn.
        """
        former, _ = self._former.get(record.endpoint_id, (0, 0.0))
        entry = self._entries.get(record.endpoint_id)
        if former or (entry and not self._yields(entry, record)):
            return False
        if entry is None or entry.record != record:
            self._enter(record, DEFAULT_LEASE_S)
        else:
            entry.renewed_s = self._clock()
        return True

    def renew(
        self, endpoint_id: str, incarnation: int, sighting: StatisticsPair | None = None
    ) -> bool:
        """Renew a lease.

        Returns:
            False if the endpoint is not known, or another incarnation holds the id.
        """
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
            for entry in self._fleets.get(fleet, {}).values()
            if entry.is_live(now_s) and not entry.is_retiring
        )

    def entries(self, num_assigned: Mapping[str, Mapping[str, int]]) -> Iterator[EndpointStatus]:
        """Yield the status of every endpoint.

        Args:
            num_assigned: Numbers of assigned sessions, by fleet and endpoint.
        """
        self._sweep()
        now_s = self._clock()
        for entry in self._entries.values():
            record = entry.record
            yield EndpointStatus(
                fleet=record.fleet,
                endpoint_id=record.endpoint_id,
                node=record.node_id,
                address=record.address,
                restarts=record.incarnation - 1,
                lease_left_s=entry.left_s(now_s),
                is_retiring=entry.is_retiring,
                num_assigned=num_assigned.get(record.fleet, {}).get(record.endpoint_id, 0),
                sighting=entry.sighting,
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
        """Remove an endpoint that has ended for good.

        Args:
            endpoint_id: Id of the endpoint.
            incarnation: Remove it only if this incarnation holds the id; None: in any case.
        """
        entry = self._entries.get(endpoint_id)
        if entry is None or incarnation not in {None, entry.record.incarnation}:
            return
        self._drop(endpoint_id)
        # Its last heartbeat may still be on its way, and must not enter it again.
        self._former[endpoint_id] = (entry.record.incarnation, self._clock() + _FORGET_AFTER_S)

    def _enter(self, record: EndpointRecord, lease_s: float) -> None:
        former = self._entries.get(record.endpoint_id)
        if former is not None and former.record.fleet != record.fleet:
            self._drop(record.endpoint_id)
        entry = _Lease(
            record, lease_s, self._clock(), is_retiring=bool(former and former.is_retiring)
        )
        self._entries[record.endpoint_id] = entry
        self._fleets.setdefault(record.fleet, {})[record.endpoint_id] = entry

    def _drop(self, endpoint_id: str) -> None:
        fleet = self._entries.pop(endpoint_id).record.fleet
        del self._fleets[fleet][endpoint_id]
        if not self._fleets[fleet]:
            del self._fleets[fleet]

    def _yields(self, entry: _Lease, record: EndpointRecord) -> bool:
        """Return whether another record of the same id may replace an entry."""
        if entry.record == record:
            return True
        # After a restart of the registry incarnations count from 1 again: only an expired lease
        # proves that the entry is the older one.
        return entry.record.incarnation < record.incarnation and entry.left_s(self._clock()) <= 0

    def _sweep(self) -> None:
        """Drop endpoints long after their leases have expired, at most once a minute."""
        now_s = self._clock()
        if now_s < self._next_sweep_s:
            return
        self._next_sweep_s = now_s + _FORGET_AFTER_S / 10
        for endpoint_id, entry in list(self._entries.items()):
            if entry.left_s(now_s) < -_FORGET_AFTER_S:
                self._drop(endpoint_id)
        for endpoint_id, (_, until_s) in list(self._former.items()):
            if until_s < now_s:
                del self._former[endpoint_id]
