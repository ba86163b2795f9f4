"""What EnvServer's options may be."""

import socket

from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.protocol.address import Address, parse_address
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


def checked_data_address(
    address: Address, data_address: str | None, data_advertise: int | None, *, is_possible: bool
) -> Address | None:
    """Return where to listen for direct TCP connections; None: nowhere.

    Args:
        address: The endpoint's.
        data_address: As the operator wrote it; None: a free port at the host of ``address``.
        data_advertise: The port that clients are told; None: the same.
        is_possible: Whether such connections are wanted, and there is no TLS.

    Raises:
        AddressError: ``data_address`` is no ``HOST:PORT``.
        ConfigurationError: There are no such connections, or the port is none.
    """
    is_named = data_address is not None or data_advertise is not None
    if is_named and not is_possible:
        raise ConfigurationError(
            "data_address and data_advertise (--data-address, --data-advertise) are for direct TCP "
            "connections, which carry no TLS: leave them out, or TLS and transport"
        )
    if data_advertise is not None and not 0 < data_advertise < 2**16:
        raise ConfigurationError(f"data_advertise={data_advertise!r} must be a port, 1 to 65535")
    if data_address is not None:
        parsed = parse_address(data_address)
        if parsed.path:
            raise AddressError(f"data_address={data_address!r} must be HOST:PORT, no unix socket")
        return parsed
    if not is_possible or address.path or not tcp.IS_POSSIBLE:
        return None
    return Address(address.host, 0)


def bound_socket(address: Address) -> socket.socket:
    """Return a socket that is bound to ``address``, and does not listen yet.

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
