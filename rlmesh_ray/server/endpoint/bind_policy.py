"""Where an endpoint may listen, and what it asks of those who come: a token, TLS."""

import logging
import socket
from typing import Any

from rlmesh_ray.auth.server_tls import ServerTls, TlsSource, resolve_server_tls
from rlmesh_ray.auth.token_file import ServerToken, TokenFile, token_store
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.protocol.address import Address, ip_of, parse_address

__all__ = [
    "ServerTls",
    "TlsSource",
    "check_exposure",
    "checked_address",
    "is_wildcard",
    "listen_arguments",
    "resolve_server_tls",
    "warn_without_token",
]

_LOG = logging.getLogger(__name__)


def checked_address(address: str, token: ServerToken) -> Address:
    """Return where to listen, if an endpoint with this token may.

    Raises:
        AddressError: ``address`` is malformed, names a protocol, or needs a token.
        ConfigurationError: ``token`` is nothing that a call can carry, or Ray's own, or its file
            cannot be used.
    """
    parsed = parse_address(address)
    dialect = client_dialect(address)
    if dialect is not None and dialect.serves_models:
        raise AddressError(
            f"{address} names the protocol that a client speaks; an endpoint serves {dialect.name} "
            f"on a port of its own: ListenOptions(..., {dialect.name}='{parsed}'), "
            f"serve-model --{dialect.name} {parsed}"
        )
    if dialect is not None:
        raise AddressError(
            f"{address} names the protocol that a client speaks; an endpoint answers all of its "
            f"protocols on one port: write {parsed} (dialects=…, --dialect restricts the protocols)"
        )
    if not isinstance(token, str | TokenFile | None) and token is not False:
        raise ConfigurationError(
            f"token is of type {type(token).__name__}: give a str or a TokenFile, or False to "
            "serve without a token on purpose"
        )
    check_exposure(parsed, token)
    token_store(token)
    return parsed


def check_exposure(address: Address, token: ServerToken, what: str = "") -> None:
    """Raise an AddressError where strangers could reach an endpoint without a token.

    ``what`` names the option with the address in the message; empty: it is the endpoint's address.
    """
    if token or token is False or address.is_local:
        return
    raise AddressError(
        f"{what}{address} can be reached from other machines: give a token (token=…, "
        "--token-file), listen on 127.0.0.1, or serve without a token on purpose "
        "(token=False, --no-token)"
    )


def warn_without_token(address: Address) -> None:
    if not address.is_local:
        _LOG.warning(
            "%s can be reached from other machines and has no token: any client may open sessions, "
            "run what is served, call what is allowed, and use this machine's processor and memory "
            "for it; a token (token=…, --token-file) keeps strangers out",
            address,
        )


def listen_arguments(address: Address) -> dict[str, Any]:
    host, port = address.host, address.port
    if host != "::" or not socket.has_dualstack_ipv6():
        return {"host": host, "port": port}
    # asyncio would leave the IPv4 half of the port to other programs.
    family = socket.AF_INET6
    return {"sock": socket.create_server((host, port), family=family, dualstack_ipv6=True)}


def is_wildcard(address: Address) -> bool:
    ip = ip_of(address.host)
    return ip is not None and ip.is_unspecified
