"""``rlmesh-ray register``: registers an endpoint of another program with a pool."""

import contextlib
import socket
import time
from typing import Annotated

import typer

from rlmesh_ray import __version__
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.log_setup import show_log
from rlmesh_ray.cli.options.common import client_tls
from rlmesh_ray.cli.register_with_pool import (
    MemberFlags,
    RegistrationConfig,
    report_registered,
)
from rlmesh_ray.cli.signals import require_no_interrupt
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address

_LOOK_EVERY_S = 1.0
_CONNECT_S = 5.0


def register(
    console: Console,
    pool: Annotated[
        str,
        typer.Argument(
            metavar="POOL@HOST:PORT", help="Name of the pool, and address of its registrar."
        ),
    ],
    address: Annotated[
        str,
        typer.Argument(metavar="ADDRESS", help="HOST:PORT of the endpoint, for its clients."),
    ],
    member: MemberFlags,
) -> None:
    """Register an endpoint of another program, in any language, with a pool while it answers.

    For servers that cannot register themselves, as serve-env --register does.

    Clients present the token that proto/rlmesh_ray/registry/v1 defines; the server may ignore it.
    """
    from rlmesh_ray.server.endpoint.bind_policy import is_wildcard

    entry = member.config(pool, address, address, client_tls(member.pool_tls_ca))
    place = entry.listening
    if place.port == 0:
        raise ConfigurationError(f"{address} cannot be dialed; name the endpoint's own port")
    if is_wildcard(place):
        raise ConfigurationError(
            f"{address} is no address that clients can dial; name the endpoint's own one"
        )
    show_log()
    with contextlib.suppress(KeyboardInterrupt):
        if not _answers(place):
            console.event("awaited", endpoint_id=entry.to.endpoint_id, address=str(place))
            console.say(
                f"nothing answers at {place} yet: an endpoint that does is registered with pool "
                f"{entry.to.pool} at {entry.to.address}"
            )
        while True:
            require_no_interrupt()
            if _answers(place):
                _attend(console, entry)
            time.sleep(_LOOK_EVERY_S)


def _attend(console: Console, entry: RegistrationConfig) -> None:
    from rlmesh_ray.client.endpoint_registration import Registration

    place = entry.listening
    registration = Registration(
        entry.to,
        host=place.host,
        port=place.port,
        version=__version__,
        on_registered=lambda registered: report_registered(console, entry, registered),
    )
    with registration:
        while _answers(place):
            registration.require_not_failed()
            require_no_interrupt()
            time.sleep(_LOOK_EVERY_S)
    console.event("away", pool=entry.to.pool, endpoint_id=entry.to.endpoint_id, address=str(place))
    console.say(f"nothing answers at {place}: out of pool {entry.to.pool} until an endpoint does")


def _answers(place: Address) -> bool:
    try:
        socket.create_connection((place.host, place.port), _CONNECT_S).close()
    except OSError:
        return False
    return True
