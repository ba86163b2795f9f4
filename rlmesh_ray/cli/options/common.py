"""Options that several commands share, and functions that read them.

A flag and the Python parameter of the same thing share their name: ``--step-grace`` is
``step_grace_s``, a repeatable ``--allow-call`` is ``allow_calls``, ``--no-observers`` is
``observers=False``.
The exception is ``--map``, which is ``observation_map``.
"""

import enum
import importlib.util
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlmesh_ray.auth import token_file
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.errors import ConfigurationError, MissingPackageError
from rlmesh_ray.files import open_file
from rlmesh_ray.options import Group, seconds_problem
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS

if TYPE_CHECKING:
    from rlmesh_ray.client.channel import ClientTls
    from rlmesh_ray.spaces.observation_map import ObservationMap

TOKEN_VARIABLE = "RLMESH_RAY_TOKEN"
_DAY_S = 86_400.0

# The groups of options in --help, as Typer takes them.
ENVIRONMENT, POLICY, SERVING, LIMITS, CONNECTION, SECURITY, POOL, OUTPUT = (
    each.value for each in Group
)


class ValidationChoice(enum.StrEnum):
    """How an endpoint treats values out of range."""

    WARN = "warn"
    STRICT = "strict"
    OFF = "off"


class Inference(enum.StrEnum):
    """How a policy's module is run."""

    AUTO = "auto"
    TORCH = "torch"
    COMPILED = "compiled"


InferenceOption = Annotated[
    Inference,
    typer.Option(
        "--inference",
        rich_help_panel=POLICY,
        help="Run the module in torch, or compiled; auto compiles it where it then gives the same.",
    ),
]

MapOption = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="KEY=SOURCE",
        rich_help_panel=POLICY,
        help="A key of the policy's observations, made from those of the client: a name, or "
        "concat, cast, resize, channels, normalise of names; repeatable.",
    ),
]

# main() reads these two from the arguments itself: usage errors must honour them too, and are
# found before any option has a value. They are declared for the parser and for --help.
JsonFlag = Annotated[
    bool,
    typer.Option(
        "--json",
        rich_help_panel=OUTPUT,
        help="One JSON object a line on stdout; text for people on stderr.",
    ),
]
DebugFlag = Annotated[
    bool,
    typer.Option("--debug", rich_help_panel=OUTPUT, help="Show the traceback of an error."),
]


def file_option(name: str, group: str, description: str, *, show_default: bool | str = True) -> Any:
    """Return an option that names a file, which must exist and be readable."""
    return typer.Option(
        name,
        exists=True,
        dir_okay=False,
        readable=True,
        rich_help_panel=group,
        help=description,
        show_default=show_default,
    )


def folder_option(
    name: str, group: str, description: str, *, show_default: bool | str = True
) -> Any:
    """Return an option that names a folder, which need not exist."""
    return typer.Option(
        name,
        metavar="FOLDER",
        parser=_folder,
        rich_help_panel=group,
        help=description,
        show_default=show_default,
    )


def _folder(name: str | Path) -> Path:
    if not str(name).strip():  # as of a variable that is not set; a Path would be the current one
        raise typer.BadParameter("the name is empty; name a folder (. is the current one)")
    if os.path.isfile(name):  # unlike Path.is_file() it takes a name that is too long
        raise typer.BadParameter(f"{name} is a file; name a folder")
    return Path(name)


TokenFile = Annotated[
    Path | None,
    file_option(
        "--token-file",
        SECURITY,
        "One token a line, optionally with its role (probe, client, operator); mode 0600.",
        show_default=f"the token in {TOKEN_VARIABLE}",
    ),
]
TlsCertificate = Annotated[
    Path | None,
    file_option("--tls-cert", SECURITY, "Certificate to present (PEM)."),
]
TlsKey = Annotated[
    Path | None,
    file_option("--tls-key", SECURITY, "Private key of --tls-cert (PEM)."),
]
TlsAuthority = Annotated[
    Path | None,
    file_option(
        "--tls-ca", SECURITY, "Use TLS; the authority that signed the endpoint's certificate (PEM)."
    ),
]
TlsFromRay = Annotated[
    bool,
    typer.Option(
        "--tls-from-ray",
        rich_help_panel=SECURITY,
        help="Mutual TLS with the files that Ray's RAY_TLS_* variables name.",
    ),
]
EditionText = Annotated[
    str | None,
    typer.Option(
        "--edition-text",
        metavar="NAME_OR_SHA256",
        rich_help_panel=CONNECTION,
        help="The edition text that the endpoint implements, if it is not this package's, "
        f"such as {next(iter(KNOWN_TEXTS))}.",
    ),
]


RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        rich_help_panel=CONNECTION,
        help="The Ray cluster, as ray.init takes it.",
        show_default="RAY_ADDRESS, or the cluster on this machine",
    ),
]
EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="A Gymnasium id, also as module:Env-v0, or module:factory of your own code.",
    ),
]
EnvKwargs = Annotated[
    str | None,
    typer.Option(
        "--env-kwargs",
        metavar="JSON",
        rich_help_panel=ENVIRONMENT,
        help="Keyword arguments of gymnasium.make or the factory.",
    ),
]
ResetTimeout = Annotated[
    float,
    typer.Option(
        "--reset-timeout",
        metavar="SECONDS",
        rich_help_panel=ENVIRONMENT,
        callback=lambda value: positive_s(value),
        help="Longest wait for a reset of all lanes.",
    ),
]


def _checked_plot(path: Path | None) -> Path | None:
    if path is not None and (path.suffix != ".png" or not path.parent.is_dir()):
        raise typer.BadParameter(f"{path} is no .png file in an existing folder; name one")
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise MissingPackageError("--plot needs matplotlib: pip install matplotlib")
    if path is not None:  # it is drawn when all episodes have ended
        is_new = not path.exists()
        try:
            open_file(path, mode="ab").close()
            if is_new:
                path.unlink()
        except OSError as error:
            raise typer.BadParameter(
                f"{path} cannot be written ({error.strerror}); name another file"
            ) from error
    return path


PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="FILE.png",
        rich_help_panel=OUTPUT,
        callback=_checked_plot,
        help="Draw returns and lengths into a file, with matplotlib.",
    ),
]


def shown_options(prefix: str = "--", **values: object) -> str:
    """Return options as a command has them, for hints; empty where none has a value.

    Args:
        prefix: Before each name.
        values: By the parameters' names; True for a flag.
    """
    given = {
        name: "" if value is True else f" {shlex.quote(str(value))}"
        for name, value in values.items()
        if value
    }
    return "".join(f" {prefix}{name.replace('_', '-')}{value}" for name, value in given.items())


def read_token(file: Path | None) -> TokenSource | None:
    """Return a client's or a server's token: ``file``, or the text in the environment, or None.

    No option takes a token itself: every user of the machine can read command lines.

    Raises:
        ConfigurationError: The file cannot be used, or the token cannot travel in a header.
    """
    if file is not None:
        source = token_file.TokenFile(file)
        source.read()
        return source
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ConfigurationError(
            f"the token in {TOKEN_VARIABLE} is not printable ASCII without spaces; make one "
            'with: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return token or None


def client_tls(
    authority: Path | None,
    certificate: Path | None = None,
    private_key: Path | None = None,
    *,
    from_ray: bool = False,
) -> "ClientTls | None":
    """Return the TLS files of a client; None for plain text.

    Args:
        authority: ``--tls-ca``.
        certificate: ``--tls-cert``; without ``authority`` the system's authorities count.
        private_key: ``--tls-key``.
        from_ray: ``--tls-from-ray``, which excludes all other TLS options.

    Raises:
        typer.BadParameter: The options do not go together.
        ConfigurationError: A file cannot be used.
    """
    from rlmesh_ray.auth.client_tls import ClientTls

    if from_ray:
        require_alone(authority, certificate, private_key)
        tls = ClientTls.from_ray()
    elif authority is None and certificate is None and private_key is None:
        return None
    else:
        tls = ClientTls(authority, certificate, private_key)
    tls.context()
    return tls


def require_alone(*files: Path | None) -> None:
    """Refuse TLS files beside ``--tls-from-ray``.

    Raises:
        typer.BadParameter: A file is given.
    """
    if any(file is not None for file in files):
        raise typer.BadParameter(
            "Ray's variables name all files; leave out the other --tls options",
            param_hint="--tls-from-ray",
        )


def parse_env_kwargs(text: str | None) -> dict[str, object] | None:
    """Return the keyword arguments in ``text``, a JSON object.

    Raises:
        typer.BadParameter: ``text`` is not a JSON object.
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


def parse_map(texts: list[str] | None) -> "ObservationMap | None":
    """Return the map of ``--map`` options; None without any.

    Raises:
        typer.BadParameter: One has another form, or its file cannot be used.
    """
    from rlmesh_ray.spaces.observation_map import as_observation_map

    try:
        return as_observation_map(texts or None)
    except ConfigurationError as error:
        raise typer.BadParameter(str(error), param_hint="--map") from error


def search_current_folder(env: str) -> None:
    """Put the current folder on ``sys.path``, if ``env`` names a module: ``module:...``.

    The path of a console script has the script's own folder instead.
    """
    here = os.getcwd()
    if ":" in env and here not in sys.path:
        sys.path.insert(0, here)


# Checks of options in seconds: typer's ``min`` would accept infinity and NaN.
def positive_s(value: float | None) -> float | None:
    """Return a finite number above 0, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    return _checked(value, allow_zero=False)


def non_negative_s(value: float | None) -> float | None:
    """Return a finite number of 0 or more, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    return _checked(value, allow_zero=True)


def at_most_a_day_s(value: float | None) -> float | None:
    """Return a finite number from 0 to the seconds of a day, or None as it is.

    Raises:
        typer.BadParameter: The number is out of range.
    """
    if value is not None and value > _DAY_S:
        raise typer.BadParameter(f"{value} is more than {_DAY_S:g} seconds, a day")
    return non_negative_s(value)


def _checked(value: float | None, **limits: Any) -> float | None:
    problem = "" if value is None else seconds_problem(value, **limits)
    if problem:
        raise typer.BadParameter(f"{value} {problem}")
    return value
