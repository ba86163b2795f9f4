"""``rlmesh-ray pool``: where endpoints outside of Ray register themselves."""

import contextlib
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import (
    ACCESS,
    POOL,
    DebugFlag,
    JsonFlag,
    TlsCertificate,
    TlsFromRay,
    TlsKey,
    client_tls,
)
from rlmesh_ray.cli.options.serving import AddressToListen, TlsClientAuthority, server_tls
from rlmesh_ray.cli.pool_registration import POOL_TOKEN_VARIABLE, pool_secret
from rlmesh_ray.errors import ConfigurationError, EndpointError

if TYPE_CHECKING:
    from rlmesh_ray.actors.pool import EnvPool
    from rlmesh_ray.actors.registry.lease_table import EndpointRecord

_POLL_S = 1.0

NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="What endpoints and trainings call the pool.")
]
SecretOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=ACCESS,
        help="The pool's token, which its endpoints have, too; mode 0600. Without it, "
        f"the variable {POOL_TOKEN_VARIABLE} counts.",
    ),
]
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        rich_help_panel=POOL,
        help="The Ray of the trainings, as ray.init takes it.",
        show_default="RAY_ADDRESS, or the one on this machine",
    ),
]
EndpointAuthorityOption = Annotated[
    Path | None,
    typer.Option(
        "--endpoint-tls-ca",
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=ACCESS,
        help="Endpoints speak TLS; who must have signed their certificates (PEM). The file must "
        "lie where runners are, too.",
    ),
]


def pool(  # noqa: PLR0913  # the command line; every option stands alone
    context: typer.Context,
    name: NameArgument,
    address: AddressToListen = "127.0.0.1:7070",
    token_file: SecretOption = None,
    tls_cert: TlsCertificate = None,
    tls_key: TlsKey = None,
    tls_client_ca: TlsClientAuthority = None,
    tls_from_ray: TlsFromRay = False,
    endpoint_tls_ca: EndpointAuthorityOption = None,
    ray_address: RayOption = None,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Keep a pool of endpoints that register themselves, beside a running Ray, until stopped.

    Endpoints come by serve-env --register NAME@HOST:PORT, on machines that need no Ray.

    Trainings on the same Ray take whatever is there: configure(config, EnvPool.find(NAME)).
    """
    from rlmesh_ray.cli.local_ray import connected_ray
    from rlmesh_ray.cli.log_setup import show_log

    if importlib.util.find_spec("ray") is None:
        raise ConfigurationError(
            "a pool is kept beside a Ray, which the base install does not have: pip install "
            "'.[rllib]' in a checkout of rlmesh-ray; endpoints do without (serve-env --register)"
        )
    console: Console = context.obj
    secret = pool_secret(token_file)
    # The registrar has a process, and a folder, of its own.
    own = [file and file.absolute() for file in (tls_cert, tls_key, tls_client_ca)]
    tls = server_tls(*own, from_ray=tls_from_ray)
    endpoint_tls = client_tls(endpoint_tls_ca and endpoint_tls_ca.absolute())
    show_log()
    # No Ray is started here: nobody would train on it.
    where = ray_address or os.environ.get("RAY_ADDRESS") or "auto"
    with (
        contextlib.suppress(KeyboardInterrupt),
        connected_ray(console, num_cpus=1, address=where),
    ):
        from rlmesh_ray.actors.pool import EnvPool

        with EnvPool(
            name, address=address, token=secret, tls=tls, endpoint_tls=endpoint_tls
        ) as started:
            _announce(console, started, is_protected=secret is not None)
            _follow(console, started)


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


def _follow(console: Console, pool: "EnvPool") -> None:
    """Tell who comes and goes, for ever."""
    known: dict[str, EndpointRecord] = {}
    while True:
        try:
            now = {record.endpoint_id: record for record in pool.endpoints}
        except EndpointError as error:
            # The registrar is another process, and goes on.
            console.say(f"who is there is not known just now: {error}", style="yellow")
            time.sleep(_POLL_S)
            continue
        for record in (known[name] for name in known.keys() - now.keys()):
            console.event("left", endpoint_id=record.endpoint_id, address=record.address)
            console.say(f"{record.endpoint_id} has left")
        for name in now:
            if now[name] != known.get(name):
                _tell_arrival(console, now[name])
        known = now
        time.sleep(_POLL_S)


def _tell_arrival(console: Console, record: "EndpointRecord") -> None:
    console.event(
        "came",
        endpoint_id=record.endpoint_id,
        address=record.address,
        incarnation=record.incarnation,
    )
    console.say(
        f"{record.endpoint_id} is there, at {record.address} (incarnation {record.incarnation})"
    )
