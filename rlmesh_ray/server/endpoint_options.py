"""The options that EnvServer and ModelServer share, each declared once.

It loads neither gRPC nor NumPy, since a command's ``--help`` is made from it.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, TypedDict

from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.options import Group, Option, as_names, require_flag, require_seconds
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS, edition_sha256

if TYPE_CHECKING:
    from rlmesh_ray.auth.server_tls import TlsSource


def edition_texts(texts: Collection[str]) -> frozenset[str]:
    """Return the sha256 of each edition text that an operator names.

    Raises:
        ConfigurationError: A text is not known.
    """
    return frozenset(map(edition_sha256, as_names("accept_edition_texts", texts)))


class ListenOptions(TypedDict, total=False):
    """Where one endpoint listens, and whom it lets in."""

    address: Annotated[
        str,
        Option(
            "``HOST:PORT`` (port 0: a free one) or ``unix:PATH``.",
            Group.SERVING,
            "127.0.0.1:0",
            flag_help="Where to listen (port 0: a free one) or unix:PATH.",
            metavar="HOST:PORT",
        ),
    ]
    token: Annotated[
        TokenSource | None,
        Option(
            "The token that clients must send, or a ``TokenFile``; required unless ``address`` is "
            "loopback.",
            Group.SECURITY,
            has_flag=False,
        ),
    ]
    tls: Annotated[
        "TlsSource | None",
        Option("Files for TLS; ``RayTls()``: those that Ray uses.", Group.SECURITY, has_flag=False),
    ]
    no_token: Annotated[
        bool,
        Option(
            "Whether the endpoint may listen without a token where other machines can reach it; "
            "the log then warns what that means.",
            Group.SECURITY,
            False,
            require_flag,
            flag_help="Serve without a token, also to clients on other machines.",
        ),
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
    endpoint_id: Annotated[
        str | None, Option("Its name in the log.", Group.OUTPUT, is_internal=True, has_flag=False)
    ]


class EndpointOptions(TypedDict, total=False):
    """What all endpoints take, whether of environments or of policies, alone or in a fleet."""

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
    ]
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
    ]
