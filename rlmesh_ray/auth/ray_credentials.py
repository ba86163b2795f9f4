"""Ray's credentials on this node: its TLS files, and its tokens, which endpoints must not use.

Ray itself is not imported: the places are those of Ray's documentation.
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file

_SWITCH = "RAY_USE_TLS"
_NAMES = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")


class RayTlsFiles(NamedTuple):
    """Paths of this node's certificate, its key and the cluster's authority."""

    certificate: Path
    private_key: Path
    authority: Path


@dataclass(frozen=True, slots=True)
class RayTls:
    """Mutual TLS with Ray's files on the node where it is used, instead of named files.

    Where Ray does not use TLS (``RAY_USE_TLS`` is not 1), nothing is encrypted.
    """

    def files(self) -> RayTlsFiles | None:
        """Return this node's files; None where Ray does not use TLS.

        Raises:
            ConfigurationError: Ray's TLS is enabled, and a variable is missing.
        """
        if os.environ.get(_SWITCH, "0").lower() not in ("1", "true"):
            return None
        missing = [name for name in _NAMES if not os.environ.get(name)]
        if missing:
            raise ConfigurationError(
                f"{_SWITCH} is set, but not {' and '.join(missing)}; set all of "
                f"{', '.join(_NAMES)} to files in PEM form, or unset {_SWITCH}"
            )
        return RayTlsFiles(*(Path(os.environ[name]) for name in _NAMES))


def require_ray_tls() -> RayTlsFiles:
    """Return the files that Ray's variables name; raises ConfigurationError without its TLS."""
    files = RayTls().files()
    if files is None:
        raise ConfigurationError(
            f"Ray does not use TLS here: set {_SWITCH}=1 and {', '.join(_NAMES)}, or name the "
            "files yourself"
        )
    return files


def ray_tokens(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return Ray's own tokens on this node, which allow running code on its cluster."""
    found = [environ.get("RAY_AUTH_TOKEN", "")]
    if named := environ.get("RAY_AUTH_TOKEN_PATH"):
        found.append(_text(Path(named)))
    with contextlib.suppress(RuntimeError):  # Path.home() may be undefined
        found.append(_text(Path.home() / ".ray" / "auth_token"))
    return tuple(token for each in found if (token := each.strip()))


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8", "replace")
    except OSError:
        return ""
