"""Validation of EnvServer's options."""

import errno
import logging
import socket
from collections.abc import Sequence
from typing import Any

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.dialects.registry import client_dialect
from rlmesh_ray.errors import AddressError, ConfigurationError, ListenError
from rlmesh_ray.options import TCP, as_int
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.server.bind_policy import check_exposure, is_wildcard
from rlmesh_ray.transport import tcp

_LOG = logging.getLogger(__name__)

DEFAULT_MAX_SESSIONS = 16
DEFAULT_STEP_GRACE_S = 5.0

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


def autoresets(autoreset: str) -> bool:
    """Return whether lanes reset by themselves.

    Raises:
        ConfigurationError: ``autoreset`` is not a known mode.
    """
    choices = {"next_step": True, "disabled": False}
    if autoreset not in choices:
        raise ConfigurationError(f"autoreset={autoreset!r} is not one of {', '.join(choices)}")
    return choices[autoreset]


def truncates_on_bad_value(on_bad_value: str) -> bool:
    """Return whether an invalid value truncates its episode.

    Raises:
        ConfigurationError: ``on_bad_value`` is not a known choice.
    """
    choices = {"error": False, "truncate": True}
    if on_bad_value not in choices:
        raise ConfigurationError(
            f"on_bad_value={on_bad_value!r} is not one of {', '.join(choices)}"
        )
    return choices[on_bad_value]


def checked_data_address(
    address: Address,
    data_address: str | None,
    data_advertise: int | None,
    transports: frozenset[str],
    *,
    has_tls: bool,
    token: TokenSource | None,
    no_token: bool,
) -> Address | None:
    """Return where to listen for direct TCP connections; None: nowhere.

    Args:
        address: Address of the endpoint.
        data_address: The operator's option; None: a free port at the host of ``address``.
        data_advertise: The port that clients dial; None: the same.
        transports: The transports that the option ``transport`` allows.
        has_tls: Whether the endpoint uses TLS.
        token: The token that its calls must carry.
        no_token: See ``EnvServer``.

    Raises:
        AddressError: ``data_address`` is no ``HOST:PORT``, or needs a token.
        ConfigurationError: Such connections are not possible, or the port is invalid.
    """
    obstacle = _obstacle_to_tcp(address, transports, has_tls=has_tls)
    if obstacle and (data_address is not None or data_advertise is not None):
        raise ConfigurationError(
            "data_address and data_advertise (--data-address, --data-advertise) are for steps over "
            f"TCP, and {obstacle}; leave them out"
        )
    if obstacle and transports == {TCP}:
        raise ConfigurationError(f'transport="tcp" is not possible: {obstacle}; leave it out')
    if data_advertise is not None and not 0 < as_int("data_advertise", data_advertise) < 2**16:
        raise ConfigurationError(f"data_advertise={data_advertise!r} must be a port, 1 to 65535")
    if data_address is not None:
        parsed = _parsed_data_address(data_address, address)
        if not no_token:
            check_exposure(parsed, token, "data_address (--data-address) ")
        return parsed
    return None if obstacle else Address(address.host, 0)


def _parsed_data_address(data_address: str, address: Address) -> Address:
    parsed = parse_address(data_address)
    if parsed.path or client_dialect(data_address) is not None:
        raise AddressError(f"data_address={data_address!r} must be HOST:PORT")
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
    return parsed


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


def checked_sessions(wanted: int | None, possible: int | None) -> int:
    """Return the maximum number of sessions, from the option and the limit of the source.

    Raises:
        ConfigurationError: The option is below 1, or above what the source can serve.
    """
    if wanted is not None and wanted < 1:
        raise ConfigurationError(f"max_sessions={wanted} must be at least 1")
    if possible is None:
        return wanted or DEFAULT_MAX_SESSIONS
    if wanted is not None and wanted > possible:
        raise ConfigurationError(
            f"max_sessions={wanted}, but an instance can serve only {possible}; "
            "give a factory or a Gymnasium id instead"
        )
    return possible
