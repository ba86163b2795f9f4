"""The states of endpoints and env runners: what the registry knows, and statistics as rates."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.observe.statistics import StatisticsPair, metrics_of, snapshot

GATEWAY_FLEETS = "gateway/"
"""Begins the name of the fleet that a gateway is shown in."""
_DIGITS = re.compile("([0-9]{1,18})")  # longer ones are no counts


@dataclass(frozen=True, slots=True)
class EndpointStatus:
    """One endpoint, as the registry knows it."""

    fleet: str
    """Empty: no fleet."""
    endpoint_id: str
    node: str
    """Empty: outside of Ray."""
    address: str
    restarts: int
    lease_left_s: float
    """0 or less: the lease has expired."""
    is_retiring: bool
    num_assigned: int
    """Number of sessions that the registry has assigned to it."""
    sighting: StatisticsPair | None
    """Its last statistics; None: none yet."""
    problem: str = ""
    """Why it could not be asked; empty: it could, or the registry was asked instead."""

    @property
    def state(self) -> str:
        """``"live"``, ``"retiring"`` or ``"stale"``."""
        if self.lease_left_s <= 0:
            return "stale"
        return "retiring" if self.is_retiring else "live"

    @property
    def service(self) -> str:
        """``"env"``, ``"model"``, ``"gateway"``, or empty while it is not known."""
        if self.fleet.startswith(GATEWAY_FLEETS):
            return "gateway"
        return "" if self.sighting is None else self.sighting.now.service


@dataclass(frozen=True, slots=True)
class RunnerStatus:
    """One env runner, as the registry knows it."""

    fleet: str
    """Fleet or pool whose endpoints it uses."""
    name: str
    """Such as ``"training runner 1"``, with RLlib's index."""
    runner_id: str
    node: str
    """Empty: not known."""
    endpoint_ids: tuple[str, ...]
    num_sessions: int
    silent_s: float
    """Seconds since it has asked for its assignments."""


def in_order(endpoint: EndpointStatus) -> tuple[str, list[tuple[int, str]]]:
    """Return a sort key: fleet and id, with numbers in order, 2 before 10."""
    parts = _DIGITS.split(endpoint.endpoint_id)
    # Digits are at the odd indices, so only parts of the same kind are compared.
    keys = [(int(each), "") if place % 2 else (0, each) for place, each in enumerate(parts)]
    return endpoint.fleet, keys


def as_fields(endpoint: EndpointStatus) -> dict[str, object]:
    """Return the fields of an endpoint; times in seconds, rates per second.

    Rates and quantiles cover the time between its last two heartbeats; quantiles its whole life, if
    nothing happened meanwhile. Unknown values are None, and so are all rates of a stale endpoint.
    """
    fields: dict[str, object] = {
        "service": endpoint.service,
        "fleet": endpoint.fleet,
        "endpoint_id": endpoint.endpoint_id,
        "node": endpoint.node,
        "address": endpoint.address,
        "state": endpoint.state,
        "restarts": endpoint.restarts,
        "lease_left_s": endpoint.lease_left_s,
        "sessions_assigned": endpoint.num_assigned,
    }
    if endpoint.sighting is None:
        return fields
    now = endpoint.sighting.now
    before = None if endpoint.state == "stale" else endpoint.sighting.before
    values, former = snapshot(now), snapshot(before) if before else {}
    took_s = now.uptime_s - before.uptime_s if before else 0.0
    fields |= {name: value or None for name, value in values.items() if isinstance(value, str)}
    for name, metric in metrics_of(type(now)).items():
        value, shown = values[name], metric.shown or name
        if isinstance(value, Histogram):
            fields |= _summary(shown, _recent(value, former.get(name)))
        elif not isinstance(value, str):
            fields[shown] = dict(value) if isinstance(value, Mapping) else value
        if metric.has_rate:
            rate = (value - former[name]) / took_s if took_s > 0 else None
            fields[f"{shown}_per_s"] = rate
    return fields


def _recent(now: Histogram, before: Histogram | None) -> Histogram:
    recent = now if before is None else now.since(before)
    return recent if recent.count else now


def _summary(name: str, histogram: Histogram) -> dict[str, float | None]:
    if not name.endswith("_s"):
        return {name: histogram.mean}
    what = name.removesuffix("_s")
    return {
        f"{what}_p50_s": histogram.quantile(0.5),
        f"{what}_p99_s": histogram.quantile(0.99),
    }
