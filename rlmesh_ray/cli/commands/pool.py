"""``rlmesh-ray pool``: a registrar for endpoints outside of Ray."""

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.local_ray import connected_ray, require_rllib
from rlmesh_ray.cli.log_setup import show_log
from rlmesh_ray.cli.options.common import (
    SECURITY,
    SERVING,
    ServerSecurity,
    client_tls,
    file_flag,
    flag,
    metrics_flag,
    ray_address_flag,
    served_metrics,
)
from rlmesh_ray.cli.register_with_pool import POOL_TOKEN_VARIABLE, pool_secret
from rlmesh_ray.cli.signals import require_no_interrupt
from rlmesh_ray.errors import EndpointError
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.server.observe.statistics import MeasuredEndpoint

if TYPE_CHECKING:
    from rlmesh_ray.actors.pool import EnvPool
    from rlmesh_ray.actors.registry.assignment_table import EndpointRecord

_POLL_S = 1.0


@dataclass(frozen=True)
class RegistrarSecurity(ServerSecurity):
    """How the registrar and its endpoints prove to each other who they are."""

    token_file: Path | None = file_flag(
        SECURITY,
        "The pool's token, which its endpoints share; mode 0600.",
        show_default=f"the token in {POOL_TOKEN_VARIABLE}",
    )
    endpoint_tls_ca: Path | None = file_flag(
        SECURITY,
        "Endpoints use TLS; the authority that signed their certificates (PEM). The file "
        "must also exist on the runners' nodes.",
    )


@dataclass(frozen=True)
class RegistrarFlags:
    """Where the registrar listens, which Ray it serves, and what it reports."""

    address: str = flag(
        SERVING,
        "Where to listen (port 0: a free one) or unix:PATH.",
        "127.0.0.1:7070",
        metavar="HOST:PORT",
    )
    ray_address: str | None = ray_address_flag()
    metrics_address: str | None = metrics_flag()


def pool(
    console: Console,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the pool, for its endpoints and trainings."),
    ],
    flags: RegistrarFlags,
    security: RegistrarSecurity,
) -> None:
    """Run the registrar of a pool of endpoints, beside a running Ray, until it is stopped.

    Endpoints register with serve-env --register NAME@HOST:PORT, on machines that need no Ray.

    Trainings on the same Ray use all registered endpoints: configure(config, EnvPool.find(NAME)).
    """
    require_rllib("a pool", ["ray"], instead="; endpoints need none (serve-env --register)")
    secret = pool_secret(security.token_file)
    # The registrar runs in another process, with another current folder.
    own: dict[str, Any] = {
        name: file.absolute() for name, file in asdict(security).items() if isinstance(file, Path)
    }
    security = replace(security, **own)
    tls, endpoint_tls = security.tls(), client_tls(security.endpoint_tls_ca)
    show_log()
    # Starts no Ray: no training would run on it.
    where = flags.ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    measured = functools.partial(_measured, fleet_name_of_pool(name))
    with (
        contextlib.suppress(KeyboardInterrupt),
        served_metrics(console, flags.metrics_address, measured) as announce_metrics,
        connected_ray(console, num_cpus=1, address=where),
    ):
        from rlmesh_ray.actors.pool import EnvPool

        with console.waiting("starting the registrar"):
            started = EnvPool(
                name, address=flags.address, token=secret, tls=tls, endpoint_tls=endpoint_tls
            )
        with started:
            _announce(console, started, is_protected=secret is not None)
            announce_metrics()
            follow(console, started)


def _announce(console: Console, pool: "EnvPool", *, is_protected: bool) -> None:
    console.event(
        "pool",
        pool=pool.name,
        address=pool.address,
        command=pool.command,
        pid=os.getpid(),
        version=__version__,
    )
    protected = {"token": "required"} if is_protected else {}
    console.facts(
        f"pool {pool.name} at {pool.address}",
        {
            "simulators": pool.command,
            "trainings": f"configure(config, EnvPool.find({pool.name!r}))",
            **protected,
            "stop with": "Ctrl-C",
        },
        [],
    )


def follow(console: Console, pool: "EnvPool") -> None:
    known: dict[str, EndpointRecord] = {}
    while True:
        require_no_interrupt()
        try:
            now = {record.endpoint_id: record for record in pool.endpoints}
        except EndpointError as error:
            # The registrar is another process, which goes on.
            console.say(f"the registered endpoints are not known now: {error}", style="yellow")
            time.sleep(_POLL_S)
            continue
        for record in (known[name] for name in known.keys() - now.keys()):
            console.event("left", endpoint_id=record.endpoint_id, address=record.address)
            console.say(f"{record.endpoint_id} has left the pool")
        for name in now:
            if now[name] != known.get(name):
                _report_arrival(console, now[name])
        known = now
        time.sleep(_POLL_S)


def _measured(fleet: str) -> Iterator[MeasuredEndpoint]:
    """Yield the pool's endpoints, with the statistics of their last reports."""
    from rlmesh_ray.actors.registry.endpoint_resolver import call_registry

    try:
        overview = call_registry("overview")
    except EndpointError:
        return  # ``follow`` says so; metrics that are missing are gaps in the dashboard
    for each in overview:
        if each.fleet == fleet and each.lease_left_s > 0 and each.sighting is not None:
            yield MeasuredEndpoint(each.endpoint_id, each.sighting.now, fleet, each.restarts)


def _report_arrival(console: Console, record: "EndpointRecord") -> None:
    console.event(
        "came",
        endpoint_id=record.endpoint_id,
        address=record.address,
        incarnation=record.incarnation,
    )
    console.say(
        f"{record.endpoint_id} has registered at {record.address} "
        f"(incarnation {record.incarnation})"
    )
