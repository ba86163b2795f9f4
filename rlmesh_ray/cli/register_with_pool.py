"""Registration of an endpoint with a pool: options of serve-env and register, and the server."""

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import rlmesh_ray
from rlmesh_ray.auth.token_file import PoolTokenFile, TokenFile, TokenSource, endpoint_token
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.options.common import POOL, client_tls, file_flag, flag
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_seconds
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.pool_membership import RegistrationAccepted, checked_name
from rlmesh_ray.server.observe.statistics_report import pack_report

if TYPE_CHECKING:
    from rlmesh_ray.client.endpoint_registration import RegistrarOptions

POOL_TOKEN_VARIABLE = "RLMESH_RAY_POOL_TOKEN"
_DAY_S = 86_400.0


def _at_most_a_day(_: str, value_s: float) -> None:
    if value_s > _DAY_S:
        raise ConfigurationError(f"{value_s} is more than {_DAY_S:g} seconds, a day")
    require_seconds("", value_s, allow_zero=True)


def pool_token_flag() -> Any:
    return file_flag(
        POOL, "The pool's token; mode 0600.", show_default=f"the token in {POOL_TOKEN_VARIABLE}"
    )


@dataclass(frozen=True)
class MemberFlags:
    """How an endpoint introduces itself to a pool's registrar."""

    pool_token_file: Path | None = pool_token_flag()
    endpoint_id: str | None = flag(
        POOL,
        "Name of this endpoint in the pool and in the log.",
        metavar="NAME",
        show_default="the host's name and a number",
    )
    pool_tls_ca: Path | None = file_flag(
        POOL,
        "Use TLS with the registrar; the authority that signed its certificate (PEM). "
        "--tls-cert, if given, is presented.",
    )

    def config(
        self,
        register: str,
        address: str,
        advertise: str | None,
        tls: "rlmesh_ray.ClientTls | None",
        leave_time_s: float = 0.0,
    ) -> "RegistrationConfig":
        """Return the settings with which an endpoint registers.

        Args:
            register: ``POOL@HOST:PORT``.
            address: Where the endpoint listens.
            advertise: The address that clients dial; None: ``address``.
            tls: TLS files for the registrar; None: plain text.
            leave_time_s: How long sessions have to move when the endpoint stops.

        Raises:
            ConfigurationError: An option is malformed, or an address is a unix socket.
        """
        pool, separator, registrar = register.partition("@")
        if not separator:
            raise ConfigurationError(
                f"{register!r} names no pool: write POOL@HOST:PORT, the pool's name and its "
                "registrar's address"
            )
        listening = parse_address(address)
        advertised = None if advertise is None else parse_address(advertise)
        if listening.path or (advertised is not None and advertised.path):
            raise ConfigurationError(
                "an endpoint that registers with a pool has clients on other machines: write "
                "HOST:PORT in place of a unix socket"
            )
        from rlmesh_ray.client.endpoint_registration import RegistrarOptions

        own_id = self.endpoint_id and checked_name(self.endpoint_id, "endpoint-id")
        to = RegistrarOptions(
            str(parse_address(registrar)),
            pool,
            _default_endpoint_id() if own_id is None else own_id,
            pool_secret(self.pool_token_file),
            tls,
        )
        return RegistrationConfig(to, listening, advertised, leave_time_s)


@dataclass(frozen=True)
class PoolFlags(MemberFlags):
    """Whether and how a served environment registers with a pool."""

    register: str | None = flag(
        POOL, "Name of the pool, and its registrar's address.", metavar="POOL@HOST:PORT"
    )
    advertise: str | None = flag(
        POOL,
        "Address that clients dial, if it is not --address; port 0: the same port.",
        metavar="HOST:PORT",
    )
    leave_time: float | None = flag(
        POOL,
        "On stop, time for sessions to move away.",
        check=_at_most_a_day,
        metavar="SECONDS",
        show_default="0",
    )

    def entry(
        self, address: str, certificate: tuple[Path | None, Path | None]
    ) -> "RegistrationConfig | None":
        """Return the settings with which the endpoint registers; None: it does not.

        Args:
            address: Where the endpoint listens.
            certificate: What it presents to the registrar, and the private key.

        Raises:
            typer.BadParameter: A flag for a pool is given where no pool is named.
            ConfigurationError: An option is malformed, or an address is a unix socket.
        """
        if self.register is not None:
            tls = client_tls(self.pool_tls_ca, *certificate) if self.pool_tls_ca else None
            return self.config(self.register, address, self.advertise, tls, self.leave_time or 0.0)
        if any(
            each is not None
            for each in (self.pool_token_file, self.advertise, self.pool_tls_ca, self.leave_time)
        ):
            raise typer.BadParameter(
                "only for an endpoint that registers with a pool: add --register POOL@HOST:PORT",
                param_hint=["--pool-token-file", "--advertise", "--pool-tls-ca", "--leave-time"],
            )
        return None


@dataclass(frozen=True, slots=True)
class RegistrationConfig:
    """The settings with which an endpoint registers."""

    to: "RegistrarOptions"
    listening: Address
    """The value of ``--address``."""
    advertised: Address | None
    """The address that clients dial; None: the one that the endpoint listens on."""
    leave_time_s: float = 0.0
    """How long sessions have to move to other endpoints when this one stops."""

    @property
    def facts(self) -> dict[str, str]:
        return {"registers with": f"{self.to.pool} at {self.to.address}, as {self.to.endpoint_id}"}

    def token(self, own: TokenSource | None) -> TokenSource | None:
        """Return the token that the endpoint's clients must present.

        Args:
            own: The endpoint's own token (``--token-file``); besides a pool's only a file counts.
        """
        if self.to.secret is None:
            return own
        derived = endpoint_token(self.to.secret, self.to.pool, self.to.endpoint_id)
        return PoolTokenFile(own.path, derived) if isinstance(own, TokenFile) else derived

    def place(self, bound: Address) -> tuple[str, int]:
        """Return host and port to register; an empty host: the one that the registrar sees.

        Args:
            bound: The address that the endpoint listens on.
        """
        from rlmesh_ray.server.endpoint.bind_policy import is_wildcard

        if self.advertised is not None:
            return self.advertised.host, self.advertised.port or bound.port
        return "" if is_wildcard(self.listening) else bound.host, bound.port


def pool_secret(file: Path | None) -> str | None:
    """Return the pool's token, from ``file`` or the environment; None where there is neither.

    Raises:
        ConfigurationError: The file cannot be used.
    """
    if file is not None:
        return TokenFile(file).client_token()
    return os.environ.get(POOL_TOKEN_VARIABLE, "").strip() or None


@contextlib.contextmanager
def registered(
    server: "rlmesh_ray.EnvServer", entry: RegistrationConfig, console: Console
) -> Iterator[Callable[[], None]]:
    """Have the endpoint of a server registered with a pool; yield what raises if it is refused.

    In the end it leaves the pool, and sessions have ``leave_time_s`` to move.

    Args:
        server: The server, which has started.
        entry: The settings of the registration.
        console: Reports each registration.
    """
    from rlmesh_ray.client.endpoint_registration import Registration

    host, port = entry.place(parse_address(server.address))
    registration = Registration(
        entry.to,
        host=host,
        port=port,
        version=rlmesh_ray.__version__,
        on_registered=lambda registered: report_registered(console, entry, registered),
        report=lambda: pack_report(server.statistics()),
    )
    try:
        with registration:
            yield registration.require_not_failed
    finally:
        if entry.leave_time_s:
            server.drain(entry.leave_time_s)


def report_registered(
    console: Console, entry: RegistrationConfig, registered: RegistrationAccepted
) -> None:
    console.event(
        "registered",
        pool=entry.to.pool,
        registrar=entry.to.address,
        endpoint_id=entry.to.endpoint_id,
        incarnation=registered.incarnation,
        address=registered.address,
    )
    console.say(
        f"in pool {entry.to.pool} as {entry.to.endpoint_id}, at {registered.address} "
        f"(incarnation {registered.incarnation})"
    )


def _default_endpoint_id() -> str:
    # Host names may have letters that names of endpoints may not.
    host = re.sub(r"[^A-Za-z0-9.-]", "", socket.gethostname(), flags=re.ASCII).lstrip(".-")
    return f"{host[:40] or 'endpoint'}-{secrets.token_hex(4)}"
