"""Which languages an endpoint speaks, if its operator names them."""

import importlib.util
from collections.abc import Collection, Sequence

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.protocol.versions import GENERATIONS

DM_ENV_RPC = "dm_env_rpc.v1"
"""What dm_env_rpc calls itself; spoken where the extra ``dm-env-rpc`` is installed."""
MODEL_DIALECT_NAMES: Sequence[str] = GENERATIONS
"""All that a model's endpoint can speak."""
ENV_DIALECT_NAMES: Sequence[str] = (*GENERATIONS, DM_ENV_RPC)
"""All that an environment's endpoint can speak."""


def checked_dialects(speaks: Collection[str] | None, able: Sequence[str]) -> frozenset[str]:
    """Return what an endpoint shall speak.

    Args:
        speaks: What its operator names; None: all that is installed.
        able: What it could speak, if everything is installed.

    Raises:
        ConfigurationError: ``speaks`` is empty, or names what is not known or not installed.
    """
    if speaks is None:
        return frozenset(filter(_is_installed, able))
    if isinstance(speaks, str):
        raise ConfigurationError(f"speaks={speaks!r} must be several names: ({speaks!r},)")
    if not speaks:
        raise ConfigurationError(f"speaks names nothing; name one or more of {', '.join(able)}")
    for name in speaks:
        if name not in able:
            raise ConfigurationError(
                f"speaks names {name!r}, which is not one of {', '.join(able)}"
            )
        if not _is_installed(name):
            raise ConfigurationError(
                f"speaks names {name!r}, which is not installed: pip install rlmesh-ray[dm-env-rpc]"
            )
    return frozenset(speaks)


def _is_installed(dialect: str) -> bool:
    return dialect != DM_ENV_RPC or importlib.util.find_spec("dm_env_rpc") is not None
