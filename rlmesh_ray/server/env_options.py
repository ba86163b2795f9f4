"""What EnvServer's options may be."""

import socket

from rlmesh_ray.credentials.token_file import TokenSource
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.options import TCP, whole
from rlmesh_ray.protocol.address import Address, parse_address, speaks_dm_env_rpc
from rlmesh_ray.server.access import check_exposure
from rlmesh_ray.transport import tcp

DEFAULT_MAX_SESSIONS = 16
DEFAULT_STEP_GRACE_S = 5.0


def resets_itself(autoreset: str) -> bool:
    """Tell whether several lanes reset by themselves.

    Raises:
        ConfigurationError: ``autoreset`` is no mode that can be chosen.
    """
    choices = {"next_step": True, "disabled": False}
    if autoreset not in choices:
        raise ConfigurationError(f"autoreset={autoreset!r} is not one of {', '.join(choices)}")
    return choices[autoreset]


def truncates_on_bad_value(on_bad_value: str) -> bool:
    """Tell whether an episode ends at a value that would be refused.

    Raises:
        ConfigurationError: ``on_bad_value`` is nothing that can be chosen.
    """
    choices = {"error": False, "truncate": True}
    if on_bad_value not in choices:
        raise ConfigurationError(
            f"on_bad_value={on_bad_value!r} is not one of {', '.join(choices)}"
        )
    return choices[on_bad_value]


def checked_data_address(  # noqa: PLR0913  # what decides it
    address: Address,
    data_address: str | None,
    data_advertise: int | None,
    transports: frozenset[str],
    *,
    has_tls: bool,
    token: TokenSource | None,
    open_to_strangers: bool,
) -> Address | None:
    """Return where to listen for direct TCP connections; None: nowhere.

    Args:
        address: The endpoint's.
        data_address: As the operator wrote it; None: a free port at the host of ``address``.
        data_advertise: The port that clients are told; None: the same.
        transports: What ``transport`` lets steps travel by.
        has_tls: Whether the endpoint speaks TLS.
        token: What calls to it must carry.
        open_to_strangers: See ``EnvServer``.

    Raises:
        AddressError: ``data_address`` is no ``HOST:PORT``, or open to strangers without a token.
        ConfigurationError: Such connections are not possible, or the port is none.
    """
    obstacle = _obstacle_to_tcp(address, transports, has_tls=has_tls)
    if obstacle and (data_address is not None or data_advertise is not None):
        raise ConfigurationError(
            "data_address and data_advertise (--data-address, --data-advertise) are for steps over "
            f"TCP, and {obstacle}; leave them out"
        )
    if obstacle and transports == {TCP}:
        raise ConfigurationError(f'transport="tcp" is not possible: {obstacle}; leave it out')
    if data_advertise is not None and not 0 < whole("data_advertise", data_advertise) < 2**16:
        raise ConfigurationError(f"data_advertise={data_advertise!r} must be a port, 1 to 65535")
    if data_address is not None:
        parsed = parse_address(data_address)
        if parsed.path or speaks_dm_env_rpc(data_address):
            raise AddressError(f"data_address={data_address!r} must be HOST:PORT")
        if parsed == address and parsed.port:
            raise AddressError(f"data_address={data_address!r} must be another port than address")
        if not open_to_strangers:
            check_exposure(parsed, token)
        return parsed
    return None if obstacle else Address(address.host, 0)


def _obstacle_to_tcp(address: Address, transports: frozenset[str], *, has_tls: bool) -> str:
    """Return why steps cannot travel by TCP; empty: they can."""
    if TCP not in transports:
        return "transport takes none"
    if has_tls:
        return "there is none with TLS"
    if address.path:
        return "there is none at a unix socket"
    return "" if tcp.IS_POSSIBLE else "this system cannot"


def bound_socket(address: Address) -> socket.socket:
    """Return a socket that listens at ``address``.

    Raises:
        AddressError: It is in use, or not this machine's.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            bound.listen()
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise AddressError(
            f"cannot listen at {address} for direct TCP connections: {error}; name another "
            "data_address (--data-address)"
        ) from error
    return bound


def checked_sessions(wanted: int | None, possible: int | None) -> int:
    """Return how many sessions to allow, given what was asked for and what the source can do.

    Raises:
        ConfigurationError: There can be none, or not so many.
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
