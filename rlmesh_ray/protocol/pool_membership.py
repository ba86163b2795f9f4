"""Who is in a pool of endpoints that registered themselves, and under which names and tokens.

Rules of the file:

* One visit (a stream) holds an endpoint id at a time: that of the endpoint that was started last.
  Whoever held it before is told, and whoever comes back to find it taken, too.
* A visit that ends takes the endpoint out of the pool only if it still holds the id.

The tokens of a pool are in ``auth/pool_tokens.py``.
"""

import enum
import ipaddress
import re
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.address import Address

MAX_ENDPOINTS = 1024
"""In one pool."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NAME_RULE = "1 to 64 letters, digits, '.', '_' and '-', the first one a letter or digit"
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", re.ASCII)
# gRPC would take HOST:PORT for an address of another kind, such as the path of a socket.
_NO_HOSTS = frozenset({"dns", "ipv4", "ipv6", "sockaddr", "unix", "unix-abstract", "vsock", "xds"})
_QUOTE = 80

ConnectionT = TypeVar("ConnectionT", bound=Hashable)


class RefusalKind(enum.Enum):
    """What an endpoint does that was refused."""

    NOT_NOW = 1
    """It tries again in a while."""
    NOT_LIKE_THIS = 2
    """It tells its operator: the same would be refused again."""
    REPLACED = 3
    """It does not come back: another endpoint holds its id."""


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """What an endpoint says of itself."""

    pool: str
    endpoint_id: str
    host: str
    """Empty: the one that the registrar sees."""
    port: int
    version: str = ""
    """For people."""
    former_incarnation: int = 0
    """As what it was registered last since it was started; 0: it was not."""


@dataclass(frozen=True, slots=True)
class RegistrationAccepted:
    """An endpoint is in the pool."""

    incarnation: int
    """Counts its registrations, from 1."""
    address: str
    """Where clients dial it."""


@dataclass(frozen=True, slots=True)
class RegistrationRefused:
    """An endpoint is not in the pool, or not any more."""

    kind: RefusalKind
    message: str


def checked_name(name: str, what: str) -> str:
    """Return ``name`` if a pool or an endpoint may have it.

    Args:
        name: To be judged.
        what: The name of the argument, for the message.

    Raises:
        ConfigurationError: It may not.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(f"{what}={name[:_QUOTE]!r} is no name: give {_NAME_RULE}")
    return name


def fleet_name_of_pool(pool: str) -> str:
    """Return under which name the cluster's registry keeps the members of a pool."""
    return f"pool/{pool}"


def full_id(pool: str, endpoint_id: str) -> str:
    """Return the id of an endpoint that no other pool's endpoint has."""
    return f"{fleet_name_of_pool(pool)}/{endpoint_id}"


def peer_host(peer: str) -> str:
    """Return the host in gRPC's name of a peer: ``ipv4:HOST:PORT`` or ``ipv6:%5BHOST%5D:PORT``.

    Empty where it is neither, such as a unix socket.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return ""
    host = rest.rpartition(":")[0].replace("%5B", "").replace("%5D", "").strip("[]")
    ip = _ip(host)
    # What a socket for both families says of an IPv4 peer.
    mapped = getattr(ip, "ipv4_mapped", None)
    return "" if ip is None else str(mapped or ip)


def validate_registration(
    request: RegistrationRequest, pool: str, seen_host: str
) -> Address | RegistrationRefused:
    """Return where clients reach the endpoint, or why it cannot be in ``pool``.

    Args:
        request: What it says.
        pool: The registrar's.
        seen_host: Where it comes from; empty where that is no address.
    """
    if request.pool != pool:
        return _invalid(
            f"this registrar is of the pool {pool!r}, not of {request.pool[:_QUOTE]!r}; name that "
            "pool, or dial the registrar of the other"
        )
    try:
        checked_name(request.endpoint_id, "endpoint id")
    except ConfigurationError as error:
        return _invalid(str(error))
    host = request.host or seen_host
    if not _is_host(host) or not 0 < request.port < 65536:
        return _invalid(
            f"{host[:_QUOTE]!r}, port {request.port}, is nowhere that clients could dial; name the "
            "endpoint's address by --advertise HOST:PORT"
        )
    address = Address(host, request.port)
    if _is_unspecified(host):
        return _invalid(
            f"{address} means any machine; name the endpoint's address by --advertise HOST:PORT"
        )
    if address.is_local and seen_host and not Address(seen_host, 0).is_local:
        return _invalid(
            f"{address} can be reached from the endpoint's own machine only, which is {seen_host}; "
            f"listen on an address of that machine (--address {seen_host}:PORT)"
        )
    return address


@dataclass(frozen=True, slots=True)
class _IdHolder(Generic[ConnectionT]):
    connection: ConnectionT
    registered: RegistrationAccepted


class EndpointIdTable(Generic[ConnectionT]):
    """Which visit holds which endpoint id.

    Args:
        max_endpoints: How many ids may be held at once.
    """

    def __init__(self, max_endpoints: int = MAX_ENDPOINTS) -> None:
        self._max_endpoints = max_endpoints
        self._holders: dict[str, _IdHolder[ConnectionT]] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def conflict(self, request: RegistrationRequest) -> RegistrationRefused | None:
        """Return why an endpoint cannot have its id now; None: it can."""
        holder = self._holders.get(request.endpoint_id)
        if holder is None:
            return self._full() if len(self._holders) >= self._max_endpoints else None
        # Its own former visit, which has not been missed yet, is in nobody's way.
        if 0 < request.former_incarnation < holder.registered.incarnation:
            return superseded_refusal(request.endpoint_id, holder.registered.address)
        return None

    def register(
        self, endpoint_id: str, connection: ConnectionT, registered: RegistrationAccepted
    ) -> ConnectionT | None:
        """Let ``connection`` hold an id; return the visit that has lost it, if one has."""
        former = self._holders.get(endpoint_id)
        self._holders[endpoint_id] = _IdHolder(connection, registered)
        return None if former is None else former.connection

    def unregister(self, endpoint_id: str, connection: ConnectionT) -> bool:
        """Note that a visit has ended; return whether nobody holds the id now."""
        holder = self._holders.get(endpoint_id)
        if holder is None or holder.connection != connection:
            return False
        del self._holders[endpoint_id]
        return True

    def _full(self) -> RegistrationRefused:
        return RegistrationRefused(
            RefusalKind.NOT_NOW,
            f"the pool is full: it has {self._max_endpoints} endpoints; start another pool",
        )


def superseded_refusal(endpoint_id: str, address: str) -> RegistrationRefused:
    """Return what the former holder of an id is told.

    Args:
        endpoint_id: Which id.
        address: Of the endpoint that holds it now.
    """
    return RegistrationRefused(
        RefusalKind.REPLACED,
        f"another endpoint, at {address}, has registered as {endpoint_id!r} since; give each "
        "endpoint an id of its own",
    )


def _invalid(message: str) -> RegistrationRefused:
    return RegistrationRefused(RefusalKind.NOT_LIKE_THIS, message)


def _is_host(host: str) -> bool:
    if _ip(host) is not None:
        # The zone of an IPv6 address may be any text, and means nothing on other machines.
        return "%" not in host
    return _HOST.fullmatch(host) is not None and host.lower() not in _NO_HOSTS


def _is_unspecified(host: str) -> bool:
    ip = _ip(host)
    return ip is not None and ip.is_unspecified


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
