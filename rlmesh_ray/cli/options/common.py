"""Flags that several commands share, as objects, and functions that read them.

A command takes such an object as a parameter; ``flags.as_command`` makes a flag of each field. A
flag and the Python parameter of the same thing share their name: ``--max-delay`` is
``max_delay_s``, a repeatable ``--allow-call`` is ``allow_calls``, ``--no-observers`` is
``observers=False``. The exception is ``--map``, which is ``observation_map``.
"""

import contextlib
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import rlmesh_ray
from rlmesh_ray.auth import token_file
from rlmesh_ray.auth.token_file import ServerToken, TokenSource
from rlmesh_ray.cli.console import Console
from rlmesh_ray.dialects import registry
from rlmesh_ray.errors import ConfigurationError, MissingPackageError
from rlmesh_ray.files import open_file
from rlmesh_ray.options import Group, declared
from rlmesh_ray.protocol.address import looks_like_address
from rlmesh_ray.protocol.handshake import KNOWN_TEXTS
from rlmesh_ray.server.endpoint.log import FORMAT_VARIABLE, LogFormat
from rlmesh_ray.server.model.model_options import ModuleOptions
from rlmesh_ray.server.observe.statistics import Measured

if TYPE_CHECKING:
    from rlmesh_ray.recording.options import RecordOptions

TOKEN_VARIABLE = "RLMESH_RAY_TOKEN"

# The groups of options in --help, as Typer takes them.
ENVIRONMENT, POLICY, EPISODES, SERVING, LIMITS, CONNECTION, SECURITY, POOL, OUTPUT = (
    each.value for each in Group
)

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


def flag(
    group: str,
    text: str,
    default: Any = None,
    *,
    check: Callable[[str, Any], object] | None = None,
    **shown: Any,
) -> Any:
    """Return a field of an object of flags; its name is that of the flag.

    Args:
        group: Group in ``--help``.
        text: A sentence for ``--help``.
        default: The value without the flag.
        check: Raises ConfigurationError, given the field's name and a value that is wrong.
        shown: Further arguments of ``typer.Option``.
    """
    declaration = {"help": text, "rich_help_panel": group, **shown}
    return field(default=default, metadata={"check": check, "declaration": declaration})


def same_flag(table: type[Mapping[str, Any]], name: str) -> Any:
    """Return a field that is the flag of an option, as its ``TypedDict`` declares it."""
    _, option = declared(table)[name]
    return flag(
        option.group.value,
        option.flag_help,
        option.default,
        check=option.require,
        metavar=option.metavar or ("SECONDS" if name.endswith("_s") else None),
        show_default=option.shown_default,
    )


def file_flag(group: str, text: str, **shown: Any) -> Any:
    return flag(group, text, exists=True, dir_okay=False, readable=True, **shown)


def folder_flag(group: str, text: str, default: Path | None = None, **shown: Any) -> Any:
    return flag(group, text, default, metavar="FOLDER", parser=_folder, **shown)


def _folder(name: str | Path) -> Path:
    if not str(name).strip():  # as of a variable that is not set; a Path would be the current one
        raise typer.BadParameter("the name is empty; name a folder (. is the current one)")
    if os.path.isfile(name):  # unlike Path.is_file() it takes a name that is too long
        raise typer.BadParameter(f"{name} is a file; name a folder")
    return Path(name)


@dataclass(frozen=True)
class MadeEnvFlags:
    """How an environment is made that is named by an id or a factory."""

    env_kwargs: str | None = flag(
        ENVIRONMENT, "Keyword arguments of gymnasium.make or the factory.", metavar="JSON"
    )

    def kwargs(self, envs: Sequence[str] = ()) -> dict[str, object] | None:
        """Return the keyword arguments.

        Args:
            envs: The environments, if these may be running endpoints.

        Raises:
            typer.BadParameter: The text is not a JSON object, or all environments are endpoints.
        """
        if self.env_kwargs is None:
            return None
        remedy = 'write a JSON object, such as \'{"render_mode": "rgb_array"}\''
        hint = "--env-kwargs"
        if envs and all(map(looks_like_address, envs)):
            raise typer.BadParameter(
                "for a Gymnasium id or a factory only; a running endpoint has its own",
                param_hint=hint,
            )
        try:
            value = json.loads(self.env_kwargs)
        except ValueError as error:
            raise typer.BadParameter(f"not JSON ({error}); {remedy}", param_hint=hint) from error
        if not isinstance(value, dict):
            raise typer.BadParameter(f"JSON, but not an object; {remedy}", param_hint=hint)
        return value


@dataclass(frozen=True)
class _OwnFiles:
    """What a client and a server prove with who they are."""

    token_file: Path | None = file_flag(
        SECURITY,
        "One token a line, optionally with its role (probe, client, operator); mode 0600.",
        show_default=f"the token in {TOKEN_VARIABLE}",
    )
    tls_cert: Path | None = file_flag(SECURITY, "Certificate to present (PEM).")
    tls_key: Path | None = file_flag(SECURITY, "Private key of --tls-cert (PEM).")
    tls_from_ray: bool = flag(
        SECURITY, "Mutual TLS with the files that Ray's RAY_TLS_* variables name.", False
    )


@dataclass(frozen=True)
class ClientSecurity(_OwnFiles):
    """How a command proves to endpoints who it is, and they to it."""

    tls_ca: Path | None = file_flag(
        SECURITY, "Use TLS; the authority that signed the endpoint's certificate (PEM)."
    )

    def to(self, address: str, edition_text: str | None = None) -> "rlmesh_ray.ConnectOptions":
        """Return how to connect to an endpoint.

        Raises:
            ConfigurationError: A file cannot be used.
        """
        return rlmesh_ray.ConnectOptions(
            address, read_token(self.token_file), self.tls(), edition_text=edition_text
        )

    def tls(self) -> "rlmesh_ray.ClientTls | None":
        """Return the TLS files of a client; None for plain text.

        Without ``tls_ca`` the system's authorities count.

        Raises:
            typer.BadParameter: The options do not go together.
            ConfigurationError: A file cannot be used.
        """
        files = (self.tls_ca, self.tls_cert, self.tls_key)
        if self.tls_from_ray:
            _require_alone(*files)

            tls = rlmesh_ray.ClientTls.from_ray()
            tls.context()
            return tls
        return client_tls(*files)


@dataclass(frozen=True)
class ConnectionFlags(ClientSecurity):
    """How a command connects to endpoints of the edition."""

    edition_text: str | None = flag(
        CONNECTION,
        "The edition text that the endpoint implements, if it is not this package's, "
        f"such as {next(iter(KNOWN_TEXTS))}.",
        metavar="NAME_OR_SHA256",
    )

    def to(self, address: str, edition_text: str | None = None) -> "rlmesh_ray.ConnectOptions":
        return super().to(address, edition_text or self.edition_text)

    @property
    def shown(self) -> str:
        return shown_options(**asdict(self))


@dataclass(frozen=True)
class ServerSecurity(_OwnFiles):
    """How a server proves to clients who it is, and they to it."""

    tls_client_ca: Path | None = file_flag(
        SECURITY, "Accept only clients with a certificate of this authority (PEM)."
    )

    def tls(self) -> "rlmesh_ray.ServerTls | None":
        """Return the TLS files of a server; None where no file is given.

        Raises:
            typer.BadParameter: The options do not go together.
            ConfigurationError: A file cannot be used.
        """
        if self.tls_from_ray:
            _require_alone(self.tls_cert, self.tls_key, self.tls_client_ca)
            tls = rlmesh_ray.ServerTls.from_ray()
        elif self.tls_cert is not None and self.tls_key is not None:
            tls = rlmesh_ray.ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)
        elif self.tls_cert is not None or self.tls_key is not None:
            raise typer.BadParameter(
                "TLS takes both files: --tls-cert and --tls-key",
                param_hint=["--tls-cert", "--tls-key"],
            )
        elif self.tls_client_ca is not None:
            raise typer.BadParameter(
                "a server that checks certificates needs its own: --tls-cert and --tls-key",
                param_hint="--tls-client-ca",
            )
        else:
            return None
        tls.context()
        return tls

    def of_clients(self, prefix: str = "--") -> str:
        """Return the options with which a command on this machine connects, for hints.

        Args:
            prefix: Before the names of the token's and the authority's options.
        """
        # gRPC trusts a certificate without its authority, too.
        own = shown_options(prefix, token_file=self.token_file, tls_ca=self.tls_cert)
        if self.tls_from_ray:
            return f"{own} --tls-from-ray"
        if self.tls_client_ca is None:
            return own
        signed = f"a client's, signed by {self.tls_client_ca}"
        return f"{own} --tls-cert CERTIFICATE --tls-key KEY  # {signed}"


@dataclass(frozen=True)
class EndpointSecurity(ServerSecurity):
    """How an endpoint proves to clients who it is, and they to it, if they have to."""

    no_token: bool = flag(
        SECURITY, "Serve without a token, also to clients on other machines.", False
    )

    def required(self, token: TokenSource | None) -> ServerToken:
        """Return what the endpoint asks of its clients.

        Args:
            token: Its own token, or that of its pool; None: it has none.

        Raises:
            ConfigurationError: There is a token, and ``--no-token``.
        """
        if not self.no_token:
            return token
        if token is not None:
            raise ConfigurationError(
                "--no-token serves every client, but there is a token (--token-file, "
                f"{TOKEN_VARIABLE} or a pool's); leave out one of the two"
            )
        return False

    def token_fact(self, token: object) -> dict[str, str]:
        if token is None:
            return {}
        return {"token": "required" if self.token_file else f"required: that of {TOKEN_VARIABLE}"}


def metrics_flag() -> Any:
    return flag(
        OUTPUT, "Serve metrics to Prometheus here.", metavar="HOST:PORT", show_default="nowhere"
    )


@dataclass(frozen=True)
class MonitoringFlags:
    """What a server reports while it serves."""

    metrics_address: str | None = metrics_flag()
    log_format: LogFormat = flag(
        OUTPUT,
        "Format of the log (warnings, sessions) on stderr.",
        LogFormat.TEXT,
        envvar=FORMAT_VARIABLE,
        show_envvar=True,
    )


@dataclass(frozen=True)
class RecordingFlags:
    """Which episodes are recorded, and where."""

    record: Path | None = folder_flag(OUTPUT, "Record episodes there (Parquet, MP4).")
    record_max_gb: float = flag(
        OUTPUT, "Stop recording at this size of the folder.", 10.0, metavar="GB"
    )
    record_video: str = flag(
        OUTPUT,
        "Videos of render, an image (its name) or none.",
        "auto",
        metavar="WHAT",
        show_default=False,
    )

    def options(self) -> "RecordOptions | None":
        """Return the options of a recording; None: nothing is recorded.

        Raises:
            ConfigurationError: A value is not possible, or belongs to no folder.
        """
        from rlmesh_ray.recording.options import RecordOptions

        if self.record is not None:
            return RecordOptions(self.record, self.record_max_gb, self.record_video)
        if names := [name for name in self.given if name != "record"]:
            shown = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ConfigurationError(
                f"{shown} without --record: nothing is recorded; add --record FOLDER"
            )
        return None

    @property
    def given(self) -> dict[str, Any]:
        """The values that are not the defaults, by name."""
        defaults = asdict(type(self)())
        return {name: each for name, each in asdict(self).items() if each != defaults[name]}


def map_flag() -> Any:
    return flag(
        POLICY,
        "A key of the policy's observations, made from those of the client: a name, or "
        "concat, cast, resize, channels, normalise of names; repeatable.",
        metavar="KEY=SOURCE",
    )


def inference_flag() -> Any:
    return same_flag(ModuleOptions, "inference")


def ray_address_flag() -> Any:
    return flag(
        CONNECTION,
        "The Ray cluster, as ray.init takes it.",
        metavar="ADDRESS",
        show_default="RAY_ADDRESS, or the cluster on this machine",
    )


EnvArgument = Annotated[
    str,
    typer.Argument(
        metavar="ENV",
        help="A Gymnasium id, also as module:Env-v0, or module:factory of your own code.",
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


def plot_flag() -> Any:
    return flag(
        OUTPUT,
        "Draw returns and lengths into a file, with matplotlib.",
        callback=_checked_plot,
        metavar="FILE.png",
    )


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
    authority: Path | None, certificate: Path | None = None, private_key: Path | None = None
) -> "rlmesh_ray.ClientTls | None":
    """Return the TLS files of a client; None for plain text.

    Raises:
        ConfigurationError: A file cannot be used.
    """
    if authority is None and certificate is None and private_key is None:
        return None

    tls = rlmesh_ray.ClientTls(authority, certificate, private_key)
    tls.context()
    return tls


def _require_alone(*files: Path | None) -> None:
    if any(file is not None for file in files):
        raise typer.BadParameter(
            "Ray's variables name all files; leave out the other --tls options",
            param_hint="--tls-from-ray",
        )


def parse_map(texts: list[str] | None) -> "rlmesh_ray.ObservationMap | None":
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


def client_scheme(dialects: Collection[str] | None) -> str:
    """Return what begins the address of a server with these dialects (``--dialect``), for hints."""
    if not dialects or set(dialects) & set(registry.model_dialects()):
        return ""
    return next(each.client_scheme for each in registry.DIALECTS if each.name in dialects)


@contextlib.contextmanager
def served_metrics(
    console: Console, address: str | None, measured: Measured
) -> Iterator[Callable[[], None]]:
    """Serve metrics, if they have an address; yield what announces that.

    Raises:
        AddressError: The address cannot be used.
    """
    if address is None:
        yield lambda: None
        return
    # It loads gRPC, which no other command needs.

    with rlmesh_ray.serve_metrics(address, measured) as bound:

        def announce() -> None:
            console.event("metrics", address=bound)
            console.say(f"metrics for Prometheus at http://{bound}/metrics")

        yield announce
