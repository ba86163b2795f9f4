"""Options that several commands share, and what is made of them."""

import enum
import json
import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.generations import PROTOCOL_V1, WIRE_V1
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS

if TYPE_CHECKING:
    from rlmesh_ray.client.channel import ClientTls
    from rlmesh_ray.server.access import ServerTls

TOKEN_VARIABLE = "RLMESH_RAY_TOKEN"


class ModelLanguage(enum.StrEnum):
    """What clients of a policy may speak."""

    PROTOCOL_V1 = PROTOCOL_V1
    WIRE_V1 = WIRE_V1


class EnvLanguage(enum.StrEnum):
    """What clients of an environment may speak."""

    PROTOCOL_V1 = PROTOCOL_V1
    WIRE_V1 = WIRE_V1
    DM_ENV_RPC = "dm_env_rpc.v1"


class Autoreset(enum.StrEnum):
    """What several lanes do after an episode's end."""

    NEXT_STEP = "next_step"
    DISABLED = "disabled"


class Validation(enum.StrEnum):
    """What happens to values out of range."""

    WARN = "warn"
    STRICT = "strict"
    OFF = "off"


# main() reads these two from the arguments itself: usage errors must honour them too, and are
# found before any option has a value. They are declared for the parser and for --help.
JsonFlag = Annotated[
    bool,
    typer.Option("--json", help="One JSON object a line on stdout; people's text on stderr."),
]
DebugFlag = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]

AddressToListen = Annotated[
    str,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Where to listen: HOST:PORT (port 0: a free one) or unix:PATH.",
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        exists=True,
        dir_okay=False,
        readable=True,
        help=f"File with the token; without it, the variable {TOKEN_VARIABLE} counts.",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option(
        "--tls-cert", exists=True, dir_okay=False, readable=True, help="Own certificate (PEM)."
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", exists=True, dir_okay=False, readable=True, help="Its key (PEM)."),
]
TlsAuthority = Annotated[
    Path | None,
    typer.Option(
        "--tls-ca",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Speak TLS; who must have signed the endpoint's certificate (PEM).",
    ),
]
EditionText = Annotated[
    str | None,
    typer.Option(
        "--edition-text",
        metavar="NAME_OR_SHA256",
        help="Edition text of an endpoint that implements another one than this package, "
        f"such as {next(iter(KNOWN_TEXTS))}.",
    ),
]
AllowShutdown = Annotated[
    bool,
    typer.Option("--allow-shutdown", help="Let clients stop the endpoint; by default none may."),
]
AcceptedTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-edition-text",
        metavar="NAME_OR_SHA256",
        help="Serve clients of another edition text as well, such as "
        f"{next(iter(KNOWN_TEXTS))}; repeatable.",
    ),
]


def read_token(file: Path | None) -> str | None:
    """Return the token, from ``file`` or the environment; None where there is neither.

    Tokens never stand on a command line: every user of the machine can read those.

    Raises:
        ConfigurationError: It cannot travel in a header.
    """
    source = str(file) if file else TOKEN_VARIABLE
    try:
        token = (file.read_text() if file else os.environ.get(TOKEN_VARIABLE, "")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the token in {source}: {error}") from error
    if file and not token:
        raise ConfigurationError(f"{file} is empty; write the token into it, on one line")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(
            f"the token in {source} is not one line of printable ASCII without spaces; make one "
            'with: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return token or None


def server_tls(certificate: Path | None, private_key: Path | None) -> "ServerTls | None":
    """Return how a server speaks TLS; None where no file is given.

    Raises:
        typer.BadParameter: Only one file is given.
        ConfigurationError: They hold no matching pair.
    """
    if certificate is None and private_key is None:
        return None
    if certificate is None or private_key is None:
        raise typer.BadParameter(
            "TLS takes both files: --tls-cert and --tls-key",
            param_hint=["--tls-cert", "--tls-key"],
        )
    try:
        # gRPC would report a bad file as an address that cannot be bound.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{certificate} and {private_key} are no certificate and its key in PEM form ({error})"
        ) from error
    from rlmesh_ray.server.access import ServerTls

    return ServerTls(certificate, private_key)


def client_tls(authority: Path | None) -> "ClientTls | None":
    """Return how a client speaks TLS; None for plain text.

    Raises:
        ConfigurationError: The file holds no certificate.
    """
    if authority is None:
        return None
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{authority} is no certificate in PEM form ({error})") from error
    from rlmesh_ray.client.channel import ClientTls

    return ClientTls(root_ca=authority)


def parse_env_kwargs(text: str | None) -> dict[str, object] | None:
    """Return the keyword arguments that ``text`` holds as JSON.

    Raises:
        typer.BadParameter: It is not a JSON object.
    """
    if text is None:
        return None
    remedy = 'write a JSON object, such as \'{"render_mode": "rgb_array"}\''
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(
            f"not JSON ({error}); {remedy}", param_hint="--env-kwargs"
        ) from error
    if not isinstance(value, dict):
        raise typer.BadParameter(f"JSON, but not an object; {remedy}", param_hint="--env-kwargs")
    return value
