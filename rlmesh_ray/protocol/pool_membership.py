"""Membership of a pool: the messages of endpoints that register themselves, and their addresses.

The tokens of a pool are in ``auth/token_file.py``.
"""

import enum
import re
from dataclasses import dataclass

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address, ip_of

MAX_ENDPOINTS = 1024

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NAME_RULE = "1 to 64 letters, digits, '.', '_' and '-', the first one a letter or digit"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
# Schemes of gRPC's addresses: with such a host, HOST:PORT would be a socket's path, say.
_NO_HOSTS = frozenset({"dns", "ipv4", "ipv6", "sockaddr", "unix", "unix-abstract", "vsock", "xds"})
_QUOTE = 80


class RefusalKind(enum.Enum):
    """What a refused endpoint should do."""

    NOT_NOW = 1
    """Retry later."""
    NOT_LIKE_THIS = 2
    """Report to the operator: the same request would be refused again."""
    REPLACED = 3
    """Stop: another endpoint holds the id."""

    @classmethod
    def _missing_(cls, value: object) -> "RefusalKind":
        return cls.NOT_NOW  # a registrar of another version may have more kinds


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """AttendRequest: an endpoint asks to join a pool."""

    pool: str
    endpoint_id: str
    host: str
    """Empty: the peer address that the registrar sees."""
    port: int
    version: str = ""
    """Version of the endpoint's software, for display."""
    former_incarnation: int = 0
    """Incarnation of its latest registration since it was started; 0: none."""


@dataclass(frozen=True, slots=True)
class RegistrationAccepted:
    """AttendResponse.registered: the endpoint is in the pool."""

    incarnation: int
    """Counts the registrations of the id, from 1."""
    address: str
    """Address for clients."""


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """AttendResponse.refusal: the endpoint is not in the pool, or not any more."""

    kind: RefusalKind
    message: str


def checked_name(name: str, what: str) -> str:
    """Return a valid name of a pool or endpoint; ConfigurationError calls it ``what``."""
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{what}={name[:_QUOTE]!r} is no name: give {_NAME_RULE}")
    return name


def fleet_name_of_pool(pool: str) -> str:
    return f"pool/{pool}"


def full_id(pool: str, endpoint_id: str) -> str:
    return f"{fleet_name_of_pool(pool)}/{endpoint_id}"


def peer_host(peer: str) -> str:
    """Return the host in gRPC's peer string: ``ipv4:HOST:PORT`` or ``ipv6:%5BHOST%5D:PORT``.

    Empty for any other, such as a unix socket.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    ip = ip_of(host)
    # A dual-stack socket reports an IPv4 peer as a mapped address.
    mapped = getattr(ip, "ipv4_mapped", None)
    return "" if ip is None else str(mapped or ip)


def validate_registration(request: RegistrationRequest, pool: str, seen_host: str) -> Address:
    """Return the endpoint's address for clients; ``seen_host`` is its peer address, or empty.

    Raises ConfigurationError for another pool, a bad id, and an address that clients cannot reach.
    """
    if request.pool != pool:
        raise ConfigurationError(
            f"this registrar serves the pool {pool!r}, not {request.pool[:_QUOTE]!r}; name that "
            "pool, or connect to the registrar of the other"
        )
    checked_name(request.endpoint_id, "endpoint id")
    host = request.host or seen_host
    if not _is_host(host) or not 0 < request.port < 65536:
        raise ConfigurationError(
            f"clients cannot connect to {host[:_QUOTE]!r}, port {request.port}; name the "
            "endpoint's address by --advertise HOST:PORT"
        )
    address = Address(host, request.port)
    ip = ip_of(host)
    if ip is not None and ip.is_unspecified:
        raise ConfigurationError(
            f"{address} means any machine; name the endpoint's address by --advertise HOST:PORT"
        )
    if address.is_local and seen_host and not Address(seen_host, 0).is_local:
        raise ConfigurationError(
            f"{address} can be reached from the endpoint's own machine only, which is {seen_host}; "
            f"listen on an address of that machine (--address {seen_host}:PORT)"
        )
    return address


def _is_host(host: str) -> bool:
    if ip_of(host) is not None:
        # The zone of an IPv6 address may be any text, and means nothing on other machines.
        return "%" not in host
    return _HOST.fullmatch(host) is not None and host.lower() not in _NO_HOSTS
