"""Where an endpoint may listen, and what it asks of those who come: a token, TLS."""

import logging
import socket
from typing import Any

from rlmesh_ray.auth.server_tls import ServerTls, TlsSource, resolve_server_tls
from rlmesh_ray.auth.token_file import TokenSource, TokenStore
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.options import require_flag
from rlmesh_ray.protocol.address import Address, ip_of, parse_address

__all__ = [
    "ServerTls",
    "TlsSource",
    "check_exposure",
    "checked_address",
    "is_wildcard",
    "listen_arguments",
    "require_one_of",
    "resolve_server_tls",
    "warn_without_token",
]

_LOG = logging.getLogger(__name__)


def checked_address(address: str, token: TokenSource | None, *, no_token: bool = False) -> Address:
    """Return where to listen, if an endpoint with this token may.

    Args:
        address: As the operator wrote it.
        token: What calls must carry.
        no_token: Whether the operator allows an endpoint without a token that other machines reach.

    Raises:
        AddressError: ``address`` is malformed, names a protocol, or needs a token.
        ConfigurationError: ``token`` is nothing that a call can carry, or Ray's own, or its file
            cannot be used, or there is one beside ``no_token``.
    """
    parsed = parse_address(address)
    dialect = client_dialect(address)
    if dialect is not None and dialect.serves_models:
        raise AddressError(
            f"{address} names the protocol that a client speaks; an endpoint serves {dialect.name} "
            f"on a port of its own: ModelServer(..., {dialect.name}='{parsed}'), "
            f"serve-model --{dialect.name} {parsed}"
        )
    if dialect is not None:
        raise AddressError(
            f"{address} names the protocol that a client speaks; an endpoint answers all of its "
            f"protocols on one port: write {parsed} (dialects=…, --dialect restricts the protocols)"
        )
    require_one_of(token, no_token=no_token)
    if not no_token:
        check_exposure(parsed, token)
    if token is not None:
        TokenStore(token)
    return parsed


def require_one_of(token: TokenSource | None, *, no_token: bool) -> None:
    """Refuse ``no_token`` beside a token.

    Raises:
        ConfigurationError: ``no_token`` is no bool, or both are given.
    """
    require_flag("no_token", no_token)
    if no_token and token is not None:
        raise ConfigurationError(
            "no_token=True (--no-token) serves every client, but there is a token (token=…, "
            "--token-file, RLMESH_RAY_TOKEN or a pool's); leave out one of the two"
        )


def check_exposure(address: Address, token: TokenSource | None, what: str = "") -> None:
    """Refuse to listen where strangers could reach an endpoint without a token.

    Args:
        address: Where.
        token: What calls must carry.
        what: Which option names it, before the address; empty: it is the endpoint's address.

    Raises:
        AddressError: ``address`` is not loopback and there is no token.
    """
    if token or address.is_local:
        return
    raise AddressError(
        f"{what}{address} can be reached from other machines: give a token (token=…, "
        "--token-file), listen on 127.0.0.1, or serve without a token on purpose "
        "(no_token=True, --no-token)"
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
    """Tell whether ``address`` means every interface of this machine."""
    ip = ip_of(address.host)
    return ip is not None and ip.is_unspecified
