"""The states of endpoints and env runners: what the registry knows, and statistics as rates."""

import re
from dataclasses import dataclass

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.statistics import EnvStatistics, ModelStatistics, StatisticsPair

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
        match self.sighting:
            case StatisticsPair(EnvStatistics()):
                return "env"
            case StatisticsPair(ModelStatistics()):
                return "model"
        return ""


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
    """Return a key that sorts endpoints by fleet and id, with numbers in order: 2 before 10."""
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
    sighting = endpoint.sighting
    if sighting is None:
        return fields
    now = sighting.now
    if endpoint.state == "stale":
        sighting = StatisticsPair(now)
    fields |= {
        "version": now.version,
        "uptime_s": now.uptime_s,
        "sessions": now.sessions.open,
        "sessions_opened": now.sessions.opened,
        "sessions_refused": now.sessions.refused,
        "sessions_lost": now.sessions.lost,
        "errors": dict(now.errors),
    }
    if isinstance(now, EnvStatistics):
        return fields | _env_fields(sighting, now)
    return fields | _model_fields(sighting, now)


def _env_fields(sighting: StatisticsPair, now: EnvStatistics) -> dict[str, object]:
    recent = _recent(sighting, "step_s")
    return {
        "steps": now.steps,
        "lane_steps": now.lane_steps,
        "resets": now.resets,
        "episodes": now.episodes,
        "worker_restarts": now.worker_restarts,
        "deviations": now.deviations,
        "transports": dict(now.transports),
        "steps_per_s": _rate(sighting, "steps"),
        "lane_steps_per_s": _rate(sighting, "lane_steps"),
        "step_p50_s": recent.quantile(0.5),
        "step_p99_s": recent.quantile(0.99),
    }


def _model_fields(sighting: StatisticsPair, now: ModelStatistics) -> dict[str, object]:
    queue, forward = _recent(sighting, "queue_s"), _recent(sighting, "forward_s")
    return {
        "predictions": now.items,
        "batches": now.batches,
        "rows": now.rows,
        "waiting": now.items_waiting,
        "routes": now.routes,
        "policy_version": now.policy_version,
        # What an older version has pickled has not even the attributes.
        "inference": getattr(now, "inference", "") or None,
        "torch_reason": getattr(now, "torch_reason", "") or None,
        "predictions_per_s": _rate(sighting, "items"),
        "rows_per_batch": _recent(sighting, "batch_rows").mean,
        "queue_p50_s": queue.quantile(0.5),
        "queue_p99_s": queue.quantile(0.99),
        "forward_p50_s": forward.quantile(0.5),
        "forward_p99_s": forward.quantile(0.99),
    }


def _rate(sighting: StatisticsPair, name: str) -> float | None:
    if sighting.before is None:
        return None
    took_s = sighting.now.uptime_s - sighting.before.uptime_s
    grown = getattr(sighting.now, name) - getattr(sighting.before, name)
    return grown / took_s if took_s > 0 else None


def _recent(sighting: StatisticsPair, name: str) -> Histogram:
    histogram: Histogram = getattr(sighting.now, name)
    if sighting.before is None:
        return histogram
    recent = histogram.since(getattr(sighting.before, name))
    return recent if recent.count else histogram
