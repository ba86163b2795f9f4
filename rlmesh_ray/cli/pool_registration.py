"""How serve-env registers its endpoint with a pool, and leaves it."""

import os
import re
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray import __version__
from rlmesh_ray.auth.pool_tokens import PoolTokenFile, endpoint_token
from rlmesh_ray.auth.token_file import TokenFile, TokenSource
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import POOL
from rlmesh_ray.cli.options.duration_params import at_most_a_day_s
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.pool_membership import RegistrationAccepted, checked_name

if TYPE_CHECKING:
    from rlmesh_ray.auth.client_tls import ClientTls
    from rlmesh_ray.client.registration import RegistrarOptions, Registration
    from rlmesh_ray.server.env_server import EnvServer
    from rlmesh_ray.server.statistics import Statistics

POOL_TOKEN_VARIABLE = "RLMESH_RAY_POOL_TOKEN"

RegisterOption = Annotated[
    str | None,
    typer.Option(
        "--register",
        metavar="POOL@HOST:PORT",
        rich_help_panel=POOL,
        help="The pool to register with: its name, and where its registrar listens.",
    ),
]
PoolTokenOption = Annotated[
    Path | None,
    typer.Option(
        "--pool-token-file",
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=POOL,
        help=f"The pool's token; mode 0600. Without it, the variable {POOL_TOKEN_VARIABLE} counts.",
    ),
]
EndpointIdOption = Annotated[
    str | None,
    typer.Option(
        "--endpoint-id",
        metavar="NAME",
        rich_help_panel=POOL,
        help="What pool and log call this endpoint.",
        show_default="the host's name and a number",
    ),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST:PORT",
        rich_help_panel=POOL,
        help="Where clients reach this endpoint, if not at --address; port 0: the same port.",
    ),
]
PoolAuthorityOption = Annotated[
    Path | None,
    typer.Option(
        "--pool-tls-ca",
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=POOL,
        help="Speak TLS with the registrar; who must have signed its certificate (PEM). The "
        "endpoint's own is shown, if it has one.",
    ),
]


LeaveTimeOption = Annotated[
    float | None,
    typer.Option(
        "--leave-time",
        metavar="SECONDS",
        rich_help_panel=POOL,
        callback=at_most_a_day_s,
        help="When stopped, how long sessions may move elsewhere; by default they are cut off.",
    ),
]


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """How an endpoint is to be registered."""

    pool: str
    registrar: str
    endpoint_id: str
    secret: str | None = field(repr=False)
    tls: "ClientTls | None"
    listening: Address
    """Where the endpoint was told to listen."""
    advertised: Address | None
    """Where clients are told to dial; None: where it listens."""
    leave_time_s: float = 0.0
    """How long its sessions have to move elsewhere in the end."""

    @property
    def facts(self) -> dict[str, str]:
        """What people are told of it."""
        return {"registers with": f"{self.pool} at {self.registrar}, as {self.endpoint_id}"}

    @property
    def connect_options(self) -> "RegistrarOptions":
        """How to reach the registrar."""
        from rlmesh_ray.client.registration import RegistrarOptions

        return RegistrarOptions(self.registrar, self.pool, self.endpoint_id, self.secret, self.tls)

    def token(self, own: TokenSource | None) -> TokenSource | None:
        """Return what the endpoint's clients must show.

        Args:
            own: What it was given besides; only a file counts.
        """
        if self.secret is None:
            return own
        derived = endpoint_token(self.secret, self.pool, self.endpoint_id)
        return PoolTokenFile(own.path, derived) if isinstance(own, TokenFile) else derived

    def place(self, bound: Address) -> tuple[str, int]:
        """Return host and port to register; no host: wherever the registrar sees us come from.

        Args:
            bound: Where the endpoint listens, in the end.
        """
        from rlmesh_ray.server.bind_policy import is_wildcard

        if self.advertised is not None:
            return self.advertised.host, self.advertised.port or bound.port
        return "" if is_wildcard(self.listening) else bound.host, bound.port


def require_unused(*options: object) -> None:
    """See to it that none of the options for a pool is given.

    Raises:
        typer.BadParameter: One is, and there is no pool to register with.
    """
    if any(option is not None for option in options):
        raise typer.BadParameter(
            "for an endpoint that registers with a pool: name it by --register POOL@HOST:PORT",
            param_hint=["--pool-token-file", "--advertise", "--pool-tls-ca", "--leave-time"],
        )


def registration_config(
    register: str,
    token_file: Path | None,
    endpoint_id: str | None,
    tls: "ClientTls | None",
    addresses: tuple[str, str | None],
) -> RegistrationConfig:
    """Return what the options say.

    Args:
        register: ``--register``.
        token_file: ``--pool-token-file``.
        endpoint_id: ``--endpoint-id``.
        tls: How to dial the registrar.
        addresses: ``--address`` and ``--advertise``.

    Raises:
        ConfigurationError: They make no sense.
    """
    pool, separator, registrar = register.partition("@")
    if not separator:
        raise ConfigurationError(
            f"{register!r} names no pool: write POOL@HOST:PORT, the pool's name and where its "
            "registrar listens"
        )
    listening = parse_address(addresses[0])
    advertised = None if addresses[1] is None else parse_address(addresses[1])
    if listening.path or (advertised is not None and advertised.path):
        raise ConfigurationError(
            "an endpoint that registers with a pool has clients on other machines: write HOST:PORT "
            "in place of a unix socket"
        )
    return RegistrationConfig(
        checked_name(pool, "pool"),
        str(parse_address(registrar)),
        checked_name(endpoint_id, "endpoint-id")
        if endpoint_id is not None
        else _default_endpoint_id(),
        pool_secret(token_file),
        tls,
        listening,
        advertised,
    )


def pool_secret(file: Path | None) -> str | None:
    """Return the pool's token, from ``file`` or the environment; None where there is neither.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    if file is not None:
        return TokenFile(file).client_token()
    return os.environ.get(POOL_TOKEN_VARIABLE, "").strip() or None


class RegisteredServer:
    """A server whose endpoint is in a pool while it serves.

    Args:
        server: Serves.
        entry: How it is registered.
        console: Told each time that it has been.
    """

    def __init__(self, server: "EnvServer", entry: RegistrationConfig, console: Console) -> None:
        self._server = server
        self._entry = entry
        self._console = console
        self._registration: Registration | None = None

    @property
    def address(self) -> str:
        """Where it listens, once it does."""
        return self._server.address

    def start(self) -> object:
        """Listen."""
        return self._server.start()

    def statistics(self) -> "Statistics":
        """Return what it has done."""
        return self._server.statistics()

    def register(self) -> None:
        """Begin to register; does not wait for it."""
        from rlmesh_ray.client.registration import Registration
        from rlmesh_ray.server.statistics_report import pack_report

        entry, console, server = self._entry, self._console, self._server
        host, port = entry.place(parse_address(self._server.address))
        self._registration = Registration(
            entry.connect_options,
            host=host,
            port=port,
            version=__version__,
            on_registered=lambda registered: report_registered(console, entry, registered),
            report=lambda: pack_report(server.statistics()),
        ).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until it has stopped; return whether it has.

        Raises:
            RlmeshError: The pool does not let it in, and will not.
        """
        if self._registration is not None:
            self._registration.require_not_failed()
        return self._server.wait(timeout_s)

    def stop(self, grace_s: float = 1.0) -> None:
        """Leave the pool, let the sessions move, then end those that are left."""
        try:
            if self._registration is not None:
                self._registration.close()
            if self._entry.leave_time_s:
                self._server.drain(self._entry.leave_time_s)
        finally:
            self._server.stop(grace_s)


def report_registered(
    console: Console, entry: RegistrationConfig, registered: RegistrationAccepted
) -> None:
    """Say that an endpoint is in its pool now."""
    console.event(
        "registered",
        pool=entry.pool,
        registrar=entry.registrar,
        endpoint_id=entry.endpoint_id,
        incarnation=registered.incarnation,
        address=registered.address,
    )
    console.say(
        f"in pool {entry.pool} as {entry.endpoint_id}, at {registered.address} "
        f"(incarnation {registered.incarnation})"
    )


def _default_endpoint_id() -> str:
    # What a host may be called beyond our names' letters is of no use to anybody.
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname(), flags=re.ASCII).lstrip(".-")
    return f"{host[:40] or 'endpoint'}-{secrets.token_hex(4)}"
