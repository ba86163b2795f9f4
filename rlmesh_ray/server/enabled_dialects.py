"""The dialects that an endpoint enables."""

import importlib.util
from collections.abc import Collection, Sequence

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.versions import GENERATIONS

DM_ENV_RPC = "dm_env_rpc.v1"
"""The name of the dm_env_rpc dialect; it needs the extra ``dm-env-rpc``."""
MODEL_DIALECT_NAMES: Sequence[str] = GENERATIONS
"""The dialects of a model endpoint."""
ENV_DIALECT_NAMES: Sequence[str] = (*GENERATIONS, DM_ENV_RPC)
"""The dialects of an environment endpoint."""


def checked_dialects(dialects: Collection[str] | None, able: Sequence[str]) -> frozenset[str]:
    """Return the names of the dialects that an endpoint enables.

    Args:
        dialects: Names that the operator chose; None: all dialects that are installed.
        able: Names of all dialects that the endpoint could enable.

    Raises:
        ConfigurationError: ``dialects`` is empty, or names one that is unknown or not installed.
    """
    if dialects is None:
        return frozenset(filter(_is_installed, able))
    if isinstance(dialects, str):
        raise ConfigurationError(f"dialects={dialects!r} must be several names: ({dialects!r},)")
    if not dialects:
        raise ConfigurationError(f"dialects names nothing; name one or more of {', '.join(able)}")
    for name in dialects:
        if name not in able:
            raise ConfigurationError(
                f"dialects names {name!r}, which is not one of {', '.join(able)}"
            )
        if not _is_installed(name):
            raise ConfigurationError(
                f"dialects names {name!r}, which is not installed: pip install "
                "rlmesh-ray[dm-env-rpc]"
            )
    return frozenset(dialects)


def _is_installed(dialect: str) -> bool:
    return dialect != DM_ENV_RPC or importlib.util.find_spec("dm_env_rpc") is not None
