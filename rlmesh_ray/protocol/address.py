"""Addresses of endpoints: ``HOST:PORT``, ``unix:PATH``, with or without ``rlmesh://``.

Servers of the released rlmesh print theirs as ``tcp://HOST:PORT``, which means the same. The scheme
of a dialect, such as ``dm_env_rpc://``, names the dialect to use there.
"""

import ipaddress
import re
from dataclasses import dataclass

from rlmesh_ray.dialects.registry import client_schemes, runner_dialect
from rlmesh_ray.errors import AddressError

_SCHEMES = ("rlmesh://", "tcp://")
# Not with the version of an environment's id at its end.
_DOMAIN_NAME = re.compile(r"(?!.*-v\d+$)[a-z0-9-]+(\.[a-z0-9-]+)+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """Address on which an endpoint listens."""

    host: str
    """Empty for a unix socket."""
    port: int
    """0 when listening: the system chooses one."""
    path: str = ""
    """Path of a unix socket."""

    @property
    def is_local(self) -> bool:
        """Whether it can be reached from this machine only."""
        ip = ip_of(self.host)
        return bool(self.path) or self.host == "localhost" or (ip is not None and ip.is_loopback)

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def looks_like_address(text: str) -> bool:
    if text.startswith((*_schemes(), "unix:")):
        return True
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdigit()


def looks_like_host(text: str) -> bool:
    """Tell whether ``text`` may be a host without a port: an IP address or a domain name.

    An environment's id without a version, or the name of a file, may look the same. A name without
    a dot is a host only if it is ``localhost``.
    """
    is_ip = ip_of(text.removeprefix("[").removesuffix("]")) is not None
    return is_ip or text == "localhost" or _DOMAIN_NAME.fullmatch(text) is not None


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that ``host`` is; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _schemes() -> tuple[str, ...]:
    return (*_SCHEMES, *client_schemes())


def _forms() -> str:
    others = [f"{scheme}HOST:PORT" for scheme in ("rlmesh://", *client_schemes())]
    return (
        "write HOST:PORT (such as 127.0.0.1:50051), unix:PATH, "
        f"{', '.join(others[:-1])} or {others[-1]}"
    )


def parse_address(text: str) -> Address:
    """Return the address that ``text`` names; raises AddressError."""
    if not isinstance(text, str):
        raise AddressError(f"{text!r:.40} is not an address; {_forms()}")
    dialect = runner_dialect(text)
    if dialect is not None:
        raise AddressError(dialect.refusal(text))
    scheme = next((each for each in _schemes() if text.startswith(each)), "")
    bare = text.removeprefix(scheme)
    if bare.startswith("unix:"):
        path = bare.removeprefix("unix:")
        if not path:
            raise AddressError(f"{text!r} names no path; {_forms()}")
        return Address("", 0, path)
    host, _, port = bare.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = host and "/" not in host and (":" not in host or ip_of(host))
    if not is_host or not (port.isascii() and port.isdigit()):
        raise AddressError(f"{text!r} is not an address; {_forms()}")
    if int(port) > 65535:
        raise AddressError(f"port {port} in {text!r} is above 65535")
    return Address(host, int(port))
