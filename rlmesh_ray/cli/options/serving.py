"""Options of the commands that serve an environment or a policy."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.cli.options.common import (
    SECURITY,
    SERVING,
    TOKEN_VARIABLE,
    file_option,
    require_alone,
    shown_options,
)
from rlmesh_ray.dialects import registry

if TYPE_CHECKING:
    from rlmesh_ray.server.bind_policy import ServerTls


AddressToListen = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        rich_help_panel=SERVING,
        help="Where to listen (port 0: a free one) or unix:PATH.",
    ),
]
TlsClientAuthority = Annotated[
    Path | None,
    file_option(
        "--tls-client-ca",
        SECURITY,
        "Accept only clients with a certificate of this authority (PEM).",
    ),
]


def client_options(
    token_file: Path | None,
    certificate: Path | None,
    client_ca: Path | None,
    *,
    from_ray: bool,
    prefix: str = "--",
) -> str:
    """Return the options with which a command connects to a server on this machine, for hints.

    Args:
        token_file: ``--token-file``.
        certificate: ``--tls-cert``; gRPC trusts it without its authority, too.
        client_ca: ``--tls-client-ca``.
        from_ray: ``--tls-from-ray``.
        prefix: Before the names of the token's and the authority's options.
    """
    own = shown_options(prefix, token_file=token_file, tls_ca=certificate)
    if from_ray:
        return f"{own} --tls-from-ray"
    if client_ca is None:
        return own
    return f"{own} --tls-cert CERTIFICATE --tls-key KEY  # a client's, signed by {client_ca}"


def client_scheme(dialects: Collection[str] | None) -> str:
    """Return what begins the address of a server with these dialects (``--dialect``), for hints."""
    if not dialects or set(dialects) & set(registry.model_dialects()):
        return ""
    return next(each.client_scheme for each in registry.DIALECTS if each.name in dialects)


def token_fact(token: object, token_file: Path | None) -> dict[str, str]:
    """Return the row of a server's table about its token, if it has one."""
    if token is None:
        return {}
    return {"token": "required" if token_file else f"required: that of {TOKEN_VARIABLE}"}


def server_tls(
    certificate: Path | None,
    private_key: Path | None,
    client_ca: Path | None = None,
    *,
    from_ray: bool = False,
) -> "ServerTls | None":
    """Return the TLS files of a server; None where no file is given.

    Args:
        certificate: ``--tls-cert``.
        private_key: ``--tls-key``.
        client_ca: ``--tls-client-ca``.
        from_ray: ``--tls-from-ray``, which excludes all other TLS options.

    Raises:
        typer.BadParameter: The options do not go together.
        ConfigurationError: A file cannot be used.
    """
    from rlmesh_ray.auth.server_tls import ServerTls

    if from_ray:
        require_alone(certificate, private_key, client_ca)
        tls = ServerTls.from_ray()
        tls.context()
        return tls
    if certificate is None and private_key is None:
        if client_ca is not None:
            raise typer.BadParameter(
                "a server that checks certificates needs its own: --tls-cert and --tls-key",
                param_hint="--tls-client-ca",
            )
        return None
    if certificate is None or private_key is None:
        raise typer.BadParameter(
            "TLS takes both files: --tls-cert and --tls-key",
            param_hint=["--tls-cert", "--tls-key"],
        )
    tls = ServerTls(certificate, private_key, client_ca)
    tls.context()
    return tls
