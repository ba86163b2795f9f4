"""The address of direct TCP connections: the option, and the sockets that listen there."""

import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import AddressError, ConfigurationError, ListenError
from rlmesh_ray.options import TCP, allowed_transports
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.server.endpoint.bind_policy import check_exposure, is_wildcard
from rlmesh_ray.server.env.env_options import EnvServerOptions
from rlmesh_ray.transport import tcp

_LOG = logging.getLogger(__name__)

_LOOPBACK = (
    (socket.AF_INET, ("127.0.0.1",)),
    (socket.AF_INET6, ("::1",)),
)
_EVERY_INTERFACE = ((socket.AF_INET6, ("::",)), (socket.AF_INET, ("0.0.0.0",)))
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}
_MOST_PORTS = 20
"""How many ports of the system's choice are tried until one is free at every address."""

_Place = tuple[socket.AddressFamily, tuple[Any, ...]]
"""Address family, and the address of ``socket.bind`` without its port, the second item."""


class DataAddress(NamedTuple):
    """Where an endpoint listens for direct TCP connections."""

    listen: Address
    advertised_port: int | None = None
    """The port that clients dial; None: the same."""


def checked_data_address(
    address: str, wanted: str | None, given: EnvServerOptions
) -> DataAddress | None:
    """Return where to listen for direct TCP connections; None: nowhere.

    Args:
        address: Where the endpoint listens.
        wanted: The value of ``data_address``.
        given: The options of the endpoint, all of them.

    Raises:
        AddressError: ``data_address`` is not ``HOST:PORT``, or needs a token.
        ConfigurationError: Such connections are not possible, or the advertised port is none.
    """
    place, transports = parse_address(address), allowed_transports(given["transport"])
    obstacle = _obstacle_to_tcp(place, transports, has_tls=given["tls"] is not None)
    if obstacle and wanted is not None:
        raise ConfigurationError(
            f"data_address (--data-address) is for steps over TCP, and {obstacle}; leave it out"
        )
    if obstacle and transports == {TCP}:
        raise ConfigurationError(f'transport="tcp" is not possible: {obstacle}; leave it out')
    if wanted is None:
        return None if obstacle else DataAddress(Address(place.host, 0))
    parsed, port = _parsed_data_address(wanted, place)
    check_exposure(parsed, given["token"], "data_address (--data-address) ")
    return DataAddress(parsed, port)


def _parsed_data_address(data_address: str, address: Address) -> tuple[Address, int | None]:
    """Return the address in ``data_address``, and the port after it that clients dial."""
    form = f"data_address={data_address!r} must be HOST:PORT or HOST:PORT/ADVERTISED"
    if client_dialect(data_address) is not None or data_address.startswith("unix:"):
        raise AddressError(form)
    listen, slash, advertised = data_address.partition("/")
    if slash and not (advertised.isdecimal() and 0 < int(advertised) < 2**16):
        raise AddressError(f"{form}, and ADVERTISED a port, 1 to 65535")
    parsed = parse_address(listen)
    is_same_host = _meet(parsed, address)
    if is_same_host and parsed.port and parsed.port == address.port:
        raise AddressError(f"data_address={data_address!r} must be another port than address")
    if not is_same_host:
        _LOG.warning(
            "clients that find the endpoint at %s will not find data_address %s (--data-address): "
            "they dial the port of the latter at the host of the former",
            address,
            parsed,
        )
    return parsed, int(advertised) if slash else None


def _obstacle_to_tcp(address: Address, transports: frozenset[str], *, has_tls: bool) -> str:
    """Return why steps cannot use TCP; empty: they can."""
    if TCP not in transports:
        return "transport takes none"
    if has_tls:
        return "there is none with TLS"
    if address.path:
        return "there is none at a unix socket"
    return "" if tcp.IS_SUPPORTED else "this system cannot"


def bound_sockets(address: Address) -> tuple[socket.socket, ...]:
    """Return sockets that listen where gRPC would listen at ``address``, all at the same port.

    That is every address of a name; for ``0.0.0.0`` and ``[::]`` every interface, IPv4 and IPv6.

    Raises:
        ListenError: It is in use, or not this machine's.
    """
    try:
        num_left = 1 if address.port else _MOST_PORTS
        places = _places(address)
        while True:
            num_left -= 1
            try:
                return _bound(places, address.port, is_one_enough=is_wildcard(address))
            except OSError as error:
                # A port that is free at the first address may be taken at the second.
                if error.errno != errno.EADDRINUSE or not num_left:
                    raise
    except OSError as error:
        raise ListenError(
            f"cannot listen at {address} for direct TCP connections: {error}; name another "
            "data_address (--data-address)"
        ) from error


def _bound(
    places: Sequence[_Place], port: int, *, is_one_enough: bool
) -> tuple[socket.socket, ...]:
    bound: list[socket.socket] = []
    missing = OSError("it has no address")
    try:
        for family, (host, *scope) in places:
            try:
                bound.append(_listening(family, (host, port, *scope)))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                missing = error  # a machine without IPv6, for instance
                continue
            if is_one_enough:
                break
            port = bound[0].getsockname()[1]
        if not bound:
            raise missing
    except BaseException:
        for each in bound:
            each.close()
        raise
    return tuple(bound)


def _listening(family: socket.AddressFamily, where: tuple[Any, ...]) -> socket.socket:
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, where[0] != "::")
        listener.bind(where)
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener


def _places(address: Address) -> Sequence[_Place]:
    """Return where to listen for ``address``.

    Raises:
        OSError: Its host name is not known.
    """
    if is_wildcard(address):
        return _EVERY_INTERFACE
    if address.host == "localhost":  # as gRPC does, which ignores this machine's hosts file
        return _LOOPBACK
    found = socket.getaddrinfo(address.host, 0, type=socket.SOCK_STREAM)
    return [(family, (where[0], *where[2:])) for family, _, _, _, where in found]


def _meet(one: Address, other: Address) -> bool:
    """Return whether ``one`` and ``other`` share an IP address, as far as that is known."""
    if is_wildcard(one) or is_wildcard(other) or one.host == other.host:
        return True
    try:
        one_hosts, other_hosts = ({where[0] for _, where in _places(each)} for each in (one, other))
    except OSError:  # listening there will fail, and say why
        return True
    return bool(one_hosts & other_hosts)
