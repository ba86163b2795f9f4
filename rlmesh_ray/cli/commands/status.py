"""``rlmesh-ray status``: the endpoints of a running cluster and their statistics."""

import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import joined_ray, require_rllib
from rlmesh_ray.cli.options.common import OUTPUT, flag, ray_address_flag
from rlmesh_ray.cli.views.status_view import tables
from rlmesh_ray.server.endpoint_status import EndpointStatus, as_fields, in_order

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
    """Return the registry's endpoints, and report them as events."""
    from rlmesh_ray.actors.registry.cluster_endpoints import cluster_endpoints

    endpoints = sorted(cluster_endpoints(), key=in_order)
    for endpoint in endpoints:
        console.event("endpoint", **as_fields(endpoint))
    console.event("status", endpoints=len(endpoints), ray_address=joined)
    return endpoints


def _shown(endpoints: list[EndpointStatus], joined: str) -> Group:
    moment = Text(f"{time.strftime('%H:%M:%S')}, Ray at {joined}", style="dim")
    return Group(moment, *tables(endpoints)) if endpoints else Group(moment, Text(_NONE))
