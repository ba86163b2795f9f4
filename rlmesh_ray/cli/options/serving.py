"""Options of commands that serve something, and what is made of them."""

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.cli.options.common import ACCESS, SERVING, require_alone
from rlmesh_ray.cli.options.duration_params import positive_s
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS
from rlmesh_ray.protocol.versions import PROTOCOL_V1, WIRE_V1

if TYPE_CHECKING:
    from rlmesh_ray.server.bind_policy import ServerTls


class ModelDialectChoice(enum.StrEnum):
    """What clients of a policy may speak."""

    PROTOCOL_V1 = PROTOCOL_V1
    WIRE_V1 = WIRE_V1


class EnvDialectChoice(enum.StrEnum):
    """What clients of an environment may speak."""

    PROTOCOL_V1 = PROTOCOL_V1
    WIRE_V1 = WIRE_V1
    DM_ENV_RPC = "dm_env_rpc.v1"


class Autoreset(enum.StrEnum):
    """What several lanes do after an episode's end."""

    NEXT_STEP = "next_step"
    DISABLED = "disabled"


class Transport(enum.StrEnum):
    """What steps may travel by, besides gRPC messages."""

    AUTO = "auto"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    GRPC = "grpc"


class OnBadValue(enum.StrEnum):
    """What happens where an observation would be refused."""

    ERROR = "error"
    TRUNCATE = "truncate"


AddressToListen = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        rich_help_panel=SERVING,
        help="Where to listen: HOST:PORT (port 0: a free one) or unix:PATH.",
    ),
]
TlsClientAuthority = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-ca",
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=ACCESS,
        help="Let in only clients with a certificate that this authority signed (PEM).",
    ),
]
OpenToStrangers = Annotated[
    bool,
    typer.Option(
        "--open-to-strangers",
        rich_help_panel=ACCESS,
        help="Listen without a token where other machines can reach it: everybody may use it.",
    ),
]
IdleTimeout = Annotated[
    float | None,
    typer.Option(
        "--idle-timeout",
        metavar="SECONDS",
        rich_help_panel=SERVING,
        callback=positive_s,
        help="End sessions without a request for so long; by default none.",
    ),
]
TransportOption = Annotated[
    Transport,
    typer.Option(
        "--transport",
        rich_help_panel=SERVING,
        help="How steps may travel, besides gRPC.",
        show_default=False,
    ),
]
DataAddress = Annotated[
    str | None,
    typer.Option(
        "--data-address",
        metavar="HOST:PORT",
        rich_help_panel=SERVING,
        help="Where steps over TCP come; by default a free port.",
    ),
]
DataAdvertise = Annotated[
    int | None,
    typer.Option(
        "--data-advertise",
        metavar="PORT",
        rich_help_panel=SERVING,
        help="That port as clients see it, if it is mapped.",
    ),
]
NoSpin = Annotated[
    bool,
    typer.Option(
        "--no-spin",
        rich_help_panel=SERVING,
        help="Have every wait sleep at once, also short ones.",
    ),
]
AllowShutdown = Annotated[
    bool,
    typer.Option(
        "--allow-shutdown",
        rich_help_panel=SERVING,
        help="Let clients stop the endpoint; by default none may.",
    ),
]
AcceptedTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-edition-text",
        metavar="NAME_OR_SHA256",
        rich_help_panel=SERVING,
        help="Serve clients of another edition text as well, such as "
        f"{next(iter(KNOWN_TEXTS))}; repeatable.",
    ),
]


def server_tls(
    certificate: Path | None,
    private_key: Path | None,
    client_ca: Path | None = None,
    *,
    from_ray: bool = False,
) -> "ServerTls | None":
    """Return how a server speaks TLS; None where no file is given.

    Args:
        certificate: ``--tls-cert``.
        private_key: ``--tls-key``.
        client_ca: ``--tls-client-ca``.
        from_ray: ``--tls-from-ray``, which stands alone.

    Raises:
        typer.BadParameter: The options do not go together.
        ConfigurationError: A file cannot be used.
    """
    from rlmesh_ray.auth.server_tls import ServerTls

    if from_ray:
        require_alone(certificate, private_key, client_ca)
        tls = ServerTls.from_ray()
        tls.context()
        return tls
    if certificate is None and private_key is None:
        if client_ca is not None:
            raise typer.BadParameter(
                "a server that checks certificates needs its own: --tls-cert and --tls-key",
                param_hint="--tls-client-ca",
            )
        return None
    if certificate is None or private_key is None:
        raise typer.BadParameter(
            "TLS takes both files: --tls-cert and --tls-key",
            param_hint=["--tls-cert", "--tls-key"],
        )
    tls = ServerTls(certificate, private_key, client_ca)
    tls.context()
    return tls
