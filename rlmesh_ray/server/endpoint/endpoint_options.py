"""The options that EnvServer and ModelServer share, each declared once.

It loads neither gRPC nor NumPy, since a command's ``--help`` is made from it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, TypedDict

from rlmesh_ray.auth.token_file import ServerToken
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.options import (
    Group,
    Option,
    as_names,
    declared,
    require_flag,
    require_seconds,
    takes_options,
)
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS, edition_sha256

if TYPE_CHECKING:
    from rlmesh_ray.auth.server_tls import TlsSource

_FREE_PORT = "127.0.0.1:0"
_ELSEWHERE = {
    "address": "each endpoint has its own address; give addresses=[HOST:PORT, ...], one for each",
    "data_address": "it is for steps of one environment's endpoint (EnvServer, EnvServiceActor)",
    "openpi": "openpi clients are served by a ModelServer",
}
"""Where a field of ``ListenOptions`` belongs that an endpoint does not take."""


def edition_texts(texts: Collection[str]) -> frozenset[str]:
    """Return the sha256 of each edition text that an operator names, by name or by sha256."""
    return frozenset(map(edition_sha256, as_names("accept_edition_texts", texts)))


def _require_host_and_port(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise AddressError(f"{name}={value!r:.40} must be HOST:PORT")


@dataclass(frozen=True)
class ListenOptions:
    """The address of an endpoint, and how it listens there; a server's ``ConnectOptions``.

    Args:
        **options: Those declared here.

    Raises:
        AddressError: ``data_address`` or ``openpi`` is not text.
        ConfigurationError: Another value is not possible.
        TypeError: There is no such option; the message names the nearest one.
    """

    address: Annotated[
        str | None,
        Option(
            "``HOST:PORT`` (port 0: a free one) or ``unix:PATH``. Default: a free port, on "
            "loopback; of an actor with a token at its node's address.",
            Group.SERVING,
            _FREE_PORT,
            flag_help="Where to listen (port 0: a free one) or unix:PATH.",
            metavar="HOST:PORT",
        ),
    ] = None
    accept_edition_texts: Annotated[
        Collection[str],
        Option(
            "Other texts of the provisional edition whose clients to serve, by sha256 or by name "
            '(``"rlmesh-0.1.0b3"``): only if you accept what they differ in.',
            Group.SERVING,
            (),
            lambda _, texts: edition_texts(texts),
            flag_help="Also serve clients of this edition text, such as "
            f"{next(iter(KNOWN_TEXTS))}; repeatable.",
            metavar="NAME_OR_SHA256",
        ),
    ] = field(default=(), kw_only=True)
    data_address: Annotated[
        str | None,
        Option(
            "Of an environment: ``HOST:PORT`` for steps over TCP, or ``HOST:PORT/ADVERTISED`` "
            "where clients dial another port, which is mapped to it, as from a container. Default: "
            "a free port at the host of ``address``.",
            Group.SERVING,
            check=_require_host_and_port,
            flag_help="For steps over TCP; /PORT: the one that clients dial.",
            metavar="HOST:PORT",
            shown_default="a free port",
        ),
    ] = field(default=None, kw_only=True)
    openpi: Annotated[
        str | None,
        Option(
            "Of a ``ModelServer``: ``HOST:PORT`` at which openpi clients are served, too, with the "
            "same token and TLS; None: nowhere. Needs the extra ``openpi``. Each connection is a "
            "session with one lane; its largest message is ``max_message_bytes``, or what an "
            "observation needs.",
            Group.SERVING,
            check=_require_host_and_port,
            flag_help="Where to serve openpi clients, too.",
            metavar="HOST:PORT",
        ),
    ] = field(default=None, kw_only=True)
    idle_timeout_s: Annotated[
        float | None,
        Option(
            "Seconds without a request after which a session ends; the client's next request "
            "raises that. Default: never, since a learner may work for minutes. A session that "
            "waits for a policy's answer is not idle.",
            Group.LIMITS,
            None,
            require_seconds,
            flag_help="End sessions that are idle this long.",
            shown_default="never",
        ),
    ] = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name, (_, option) in declared(ListenOptions).items():
            option.require(name, vars(self)[name])
        # A list has no hash.
        texts = as_names("accept_edition_texts", self.accept_edition_texts)
        object.__setattr__(self, "accept_edition_texts", texts)


takes_options(ListenOptions)(ListenOptions)


def listening(
    owner: str,
    address: str | ListenOptions | None,
    *refused: str,
    default: str = _FREE_PORT,
) -> tuple[str, ListenOptions]:
    """Return where an endpoint listens, and how.

    A ConfigurationError says that ``owner``, which the caller has called, does not take a field
    that is ``refused``.
    """
    listen = address if isinstance(address, ListenOptions) else ListenOptions(address)
    for name in refused:
        value = vars(listen)[name]
        if value is not None:
            raise ConfigurationError(f"{owner} takes no {name}={value!r:.60}: {_ELSEWHERE[name]}")
    return default if listen.address is None else listen.address, listen


class EndpointOptions(TypedDict, total=False):
    """Where one endpoint listens, and whom it lets in."""

    address: Annotated[
        str | ListenOptions,
        Option(
            "``HOST:PORT`` (port 0: a free one) or ``unix:PATH``, or ``ListenOptions``.",
            Group.SERVING,
            _FREE_PORT,
            has_flag=False,  # commands have those of ``ListenOptions``
        ),
    ]
    token: Annotated[
        ServerToken,
        Option(
            "The token that clients must send, or a ``TokenFile``; required unless ``address`` is "
            "loopback. False: none on purpose, also where other machines can reach the endpoint; "
            "the log then warns what that means.",
            Group.SECURITY,
            has_flag=False,
        ),
    ]
    tls: Annotated[
        "TlsSource | None",
        Option("Files for TLS; ``RayTls()``: those that Ray uses.", Group.SECURITY, has_flag=False),
    ]
    allow_shutdown: Annotated[
        bool,
        Option(
            "Whether a client's Shutdown stops the server, as ``stop`` does.",
            Group.SECURITY,
            False,
            require_flag,
            flag_help="Let clients stop the endpoint.",
        ),
    ]
