"""Why an environment could not be created, in one line that names the remedy."""

import sys

from gymnasium import error as gymnasium_error

from rlmesh_ray.errors import ConfigurationError


def explain(error: BaseException) -> str:
    """Return cause and remedy of ``error``, raised while an environment was created."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigurationError):
        return text
    if isinstance(error, (gymnasium_error.UnregisteredEnv, gymnasium_error.DeprecatedEnv)):
        return f"{text} (an id that a package registers is written module:Env-v0)"
    if isinstance(error, ModuleNotFoundError):
        return f"{text} (install it for {sys.executable}, or put its folder on PYTHONPATH)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
