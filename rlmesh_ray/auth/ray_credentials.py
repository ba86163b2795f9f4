"""What Ray keeps for itself on this node: its token, which is not ours to use, and its TLS files.

Ray itself is not needed: both are found as Ray's own documentation says.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlmesh_ray.errors import ConfigurationError

_SWITCH = "RAY_USE_TLS"
_NAMES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


class RayTlsFiles(NamedTuple):
    """Where this node's own certificate, its key and the cluster's authority lie."""

    certificate: Path
    private_key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class RayTls:
    """In place of files: mutual TLS with those that Ray uses, on whatever node that comes to pass.

    Where Ray does not use TLS (``RAY_USE_TLS`` is not 1), nothing is encrypted.
    """

    def files(self) -> RayTlsFiles | None:
        """Return this node's files; None where Ray does not use TLS.

        Raises:
            ConfigurationError: Ray is told to use TLS, and not with which files.
        """
        return ray_tls_files()


def ray_tls_files(environ: Mapping[str, str] = os.environ) -> RayTlsFiles | None:
    """Return the files that Ray's variables name; None where Ray does not use TLS.

    Raises:
        ConfigurationError: Ray is told to use TLS, and a variable is missing.
    """
    if environ.get(_SWITCH, "0").lower() not in ("1", "true"):
        return None
    missing = [name for name in _NAMES if not environ.get(name)]
    if missing:
        raise ConfigurationError(
            f"{_SWITCH} is set, and {' and '.join(missing)} not; set all of {', '.join(_NAMES)} to "
            f"files in PEM form, or unset {_SWITCH}"
        )
    return RayTlsFiles(*(Path(environ[name]) for name in _NAMES))


def require_ray_tls() -> RayTlsFiles:
    """Return the files that Ray's variables name.

    Raises:
        ConfigurationError: Ray does not use TLS, or a variable is missing.
    """
    files = ray_tls_files()
    if files is None:
        raise ConfigurationError(
            f"Ray does not use TLS here: set {_SWITCH}=1 and {', '.join(_NAMES)}, or name the "
            "files yourself"
        )
    return files


def ray_tokens(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the tokens with which Ray lets people run code on its cluster, if they are here."""
    found = [environ.get("RAY_AUTH_TOKEN", "")]
    if named := environ.get("RAY_AUTH_TOKEN_PATH"):
        found.append(_text(Path(named)))
    with contextlib.suppress(RuntimeError):  # there may be no home
        found.append(_text(Path.home() / ".ray" / "auth_token"))
    return tuple(token for each in found if (token := each.strip()))


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""
