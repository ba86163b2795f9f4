"""``rlmesh-ray status``: the endpoints of a running cluster and their statistics."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import joined_ray, require_rllib
from rlmesh_ray.cli.options.common import OUTPUT, flag, ray_address_flag
from rlmesh_ray.server.observe.endpoint_status import (
    GATEWAY_FLEETS,
    EndpointStatus,
    as_fields,
    in_order,
)

DASHBOARD = Path(__file__).parents[1] / "grafana.json"
"""Edited by hand; its queries match the names of metrics with and without Ray's prefix."""
_PERIOD_S = 3.0  # how often endpoints report
_NONE = (
    "no endpoints: nothing has been started with EnvFleet, ModelFleet or an endpoint_id in this "
    "cluster, and nothing is registered with a pool"
)

_WITHOUT_RAY = (
    "; it connects to a Ray cluster, also with --ray-address. Without Ray, use on each endpoint: "
    "rlmesh-ray inspect ADDRESS"
)


@dataclass(frozen=True)
class StatusFlags:
    """Which cluster is shown, and how."""

    ray_address: str | None = ray_address_flag()
    watch: bool = flag(OUTPUT, "Refresh every 3 s, as often as endpoints report.", False)
    dashboard: bool = flag(OUTPUT, "Print a Grafana dashboard instead; needs no cluster.", False)


def status(console: Console, flags: StatusFlags) -> None:
    """Show the endpoints of a running Ray cluster: sessions, rates, latencies, restarts.

    Endpoints outside of Ray are shown if they are registered with a pool; see `inspect` for others.
    """
    if flags.dashboard:
        sys.stdout.write(DASHBOARD.read_text())
        return
    require_rllib("status", ["ray"], instead=_WITHOUT_RAY)
    with joined_ray(console, flags.ray_address) as joined:
        if not flags.watch:
            console.show(_shown(_query(console, joined), joined))
            return
        with contextlib.suppress(KeyboardInterrupt):  # the only way to end it
            _watch(console, joined)


def _watch(console: Console, joined: str) -> None:
    if not console.people.is_terminal:
        while True:
            console.show(_shown(_query(console, joined), joined))
            time.sleep(_PERIOD_S)
    with Live(console=console.people, auto_refresh=False) as live:
        while True:
            live.update(_shown(_query(console, joined), joined), refresh=True)
            time.sleep(_PERIOD_S)


def _query(console: Console, joined: str) -> list[EndpointStatus]:
    from rlmesh_ray.actors.registry.endpoint_resolver import cluster_endpoints

    endpoints = sorted(cluster_endpoints(), key=in_order)
    for endpoint in endpoints:
        console.event("endpoint", **as_fields(endpoint))
    console.event("status", endpoints=len(endpoints), ray_address=joined)
    return endpoints


def _shown(endpoints: list[EndpointStatus], joined: str) -> Group:
    moment = Text(f"{time.strftime('%H:%M:%S')}, Ray at {joined}", style="dim")
    return Group(moment, *tables(endpoints)) if endpoints else Group(moment, Text(_NONE))


_NOTHING = "-"
_LAST = ("model", "gateway")


def tables(endpoints: Iterable[EndpointStatus]) -> Iterator[Table]:
    ordered = sorted(endpoints, key=lambda each: (_rank(each), *in_order(each)))
    for (_, fleet), group in groupby(ordered, key=lambda each: (_rank(each), each.fleet)):
        title = f"fleet {fleet}" if fleet else "without a fleet"
        if fleet.startswith(GATEWAY_FLEETS):
            title = f"gateways to {fleet.removeprefix(GATEWAY_FLEETS)}"
        yield _table(title, list(group))


def _rank(endpoint: EndpointStatus) -> int:
    return _LAST.index(endpoint.service) + 1 if endpoint.service in _LAST else 0


_Fields = dict[str, object]
_Column = tuple[str, Callable[[EndpointStatus, _Fields], str]]


def _number(header: str, field: str) -> _Column:
    return header, lambda _, fields: _cell_text(fields.get(field))


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
    shown = _cell_text(fields.get("sessions"))
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


def _cell_text(value: object) -> str:
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
