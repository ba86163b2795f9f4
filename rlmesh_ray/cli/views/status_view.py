"""What ``rlmesh-ray status`` shows of the endpoints: tables for people, objects for programs."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.statistics import EnvStatistics, ModelStatistics, StatisticsPair

_NOTHING = "-"
_GATEWAY = "gateway/"  # begins the name of the fleet that a gateway is shown in
_LAST = ("model", "gateway")
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

    @property
    def state(self) -> str:
        """``"live"``, ``"retiring"`` or ``"stale"``."""
        if self.lease_left_s <= 0:
            return "stale"
        return "retiring" if self.is_retiring else "live"

    @property
    def service(self) -> str:
        """``"env"``, ``"model"``, ``"gateway"``, or empty while it is not known."""
        if self.fleet.startswith(_GATEWAY):
            return "gateway"
        match self.sighting:
            case StatisticsPair(EnvStatistics()):
                return "env"
            case StatisticsPair(ModelStatistics()):
                return "model"
        return ""


def tables(endpoints: Iterable[EndpointStatus]) -> Iterator[Table]:
    """Yield a table for each fleet and service, with endpoints sorted by id."""
    ordered = sorted(endpoints, key=lambda each: (_rank(each), *in_order(each)))
    for (_, fleet), group in groupby(ordered, key=lambda each: (_rank(each), each.fleet)):
        title = f"fleet {fleet}" if fleet else "without a fleet"
        if fleet.startswith(_GATEWAY):
            title = f"gateways to {fleet.removeprefix(_GATEWAY)}"
        yield _table(title, list(group))


def _rank(endpoint: EndpointStatus) -> int:
    return _LAST.index(endpoint.service) + 1 if endpoint.service in _LAST else 0


def in_order(endpoint: EndpointStatus) -> tuple[str, list[tuple[int, str]]]:
    """Return a key that sorts endpoints by fleet and id, with numbers in order: 2 before 10."""
    parts = _DIGITS.split(endpoint.endpoint_id)
    # Digits are at the odd indices, so only parts of the same kind are compared.
    keys = [(int(each), "") if place % 2 else (0, each) for place, each in enumerate(parts)]
    return endpoint.fleet, keys


def as_fields(endpoint: EndpointStatus) -> dict[str, object]:
    """Return the fields of an endpoint's event; times in seconds, rates per second.

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


_Fields = dict[str, object]
_Column = tuple[str, Callable[[EndpointStatus, _Fields], str]]


def _number(header: str, field: str) -> _Column:
    return header, lambda _, fields: _shown(fields.get(field))


def _times(header: str, field: str) -> _Column:
    def cell(_: EndpointStatus, fields: _Fields) -> str:
        low, high = (fields.get(f"{field}_{share}_s") for share in ("p50", "p99"))
        return _NOTHING if low is None else f"{_duration(low)}, {_duration(high)}"

    return f"{header} p50, p99", cell


_NODE: _Column = ("node", lambda endpoint, _: _place(endpoint))
_OF_ALL: tuple[_Column, ...] = (
    ("address", lambda endpoint, _: endpoint.address),
    ("state", lambda endpoint, _: _state(endpoint)),
    ("restarts", lambda endpoint, _: str(endpoint.restarts)),
)
_SESSIONS: _Column = ("sessions", lambda endpoint, fields: _sessions(endpoint, fields))
_TROUBLE: _Column = ("trouble", lambda _, fields: _trouble(fields))
_OF_ENVS = (
    _SESSIONS,
    _number("steps/s", "lane_steps_per_s"),
    _times("step", "step"),
    _number("episodes", "episodes"),
    _TROUBLE,
)
_OF_MODELS = (
    _SESSIONS,
    _number("predicted /s", "predictions_per_s"),
    _number("rows /batch", "rows_per_batch"),
    _times("queue", "queue"),
    _times("forward", "forward"),
    _number("weights", "policy_version"),
    _TROUBLE,
)
_OF_SERVICE: dict[str, tuple[_Column, ...]] = {"model": _OF_MODELS, "gateway": ()}
_STYLES = {"stale": "red", "retiring": "yellow", "live": ""}


def _table(title: str, endpoints: list[EndpointStatus]) -> Table:
    rows = [as_fields(endpoint) for endpoint in endpoints]
    versions = sorted({str(fields["version"]) for fields in rows if "version" in fields})
    if versions:
        title = f"{title}, rlmesh-ray {' and '.join(versions)}"
    # Most addresses name the node; others need a column for it.
    nodes = (_NODE,) if any(map(_place, endpoints)) else ()
    columns = (*nodes, *_OF_ALL, *_OF_SERVICE.get(endpoints[0].service, _OF_ENVS))
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.collapse_padding, table.pad_edge = True, False
    table.add_column("endpoint", no_wrap=True)
    for header, _ in columns:
        is_text = header in {"node", "address", "state", "trouble"}
        justify: Literal["left", "right"] = "left" if is_text else "right"
        # Text that users copy is not wrapped.
        table.add_column(header, no_wrap=header in {"node", "address"}, justify=justify)
    for endpoint, fields in zip(endpoints, rows, strict=True):
        cells = (cell(endpoint, fields) for _, cell in columns)
        table.add_row(endpoint.endpoint_id, *cells, style=_STYLES[endpoint.state])
    return table


def _place(endpoint: EndpointStatus) -> str:
    if not endpoint.node:
        return "outside of Ray"
    return "" if endpoint.node in endpoint.address else endpoint.node


def _state(endpoint: EndpointStatus) -> str:
    if endpoint.state == "stale":
        return f"stale for {_rounded(-endpoint.lease_left_s)} s"
    return endpoint.state


def _sessions(endpoint: EndpointStatus, fields: _Fields) -> str:
    shown = _shown(fields.get("sessions"))
    shown = f"{shown} of {endpoint.num_assigned}" if endpoint.num_assigned else shown
    transports = fields.get("transports")
    if isinstance(transports, dict) and transports:
        shown += f" ({', '.join(f'{count} {name}' for name, count in sorted(transports.items()))})"
    return shown


def _trouble(fields: _Fields) -> str:
    named = {
        "lost": fields.get("sessions_lost"),
        "refused": fields.get("sessions_refused"),
        "workers replaced": fields.get("worker_restarts"),
        "values out of range": fields.get("deviations"),
    }
    parts = [f"{name} {count}" for name, count in named.items() if count]
    errors = fields.get("errors")
    if isinstance(errors, dict):
        parts += [f"{code} {count}" for code, count in sorted(errors.items())]
    return ", ".join(parts)


def _shown(value: object) -> str:
    if value is None:
        return _NOTHING
    return _rounded(value) if isinstance(value, float) else str(value)


def _rounded(value: float) -> str:
    return f"{value:,.1f}" if 0 < abs(value) < 10 else f"{value:,.0f}"


def _duration(value_s: object) -> str:
    if not isinstance(value_s, float):
        return _NOTHING
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value_s * factor >= 1:
            return f"{value_s * factor:.3g} {unit}"
    return f"{value_s * 1e6:.3g} µs"
