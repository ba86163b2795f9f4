"""Arguments of actors that survive until Ray restarts the actor."""

import cloudpickle
import ray

from rlmesh_ray.errors import ConfigurationError

MAX_INLINE_BYTES = 64 * 1024
"""Largest argument that Ray keeps with the actor; Ray's own limit is 100 KiB."""


def durable(name: str, value: object) -> object:
    """Return ``value``, or an object reference to it, as an argument that survives restarts.

    Ray keeps small arguments with the actor. An object in Ray's store lives only as long as a
    reference to it: the caller keeps the result as long as the actor may restart.

    Args:
        name: Name of the value, for error messages.
        value: The value; text is returned as it is.

    Raises:
        ConfigurationError: ``value`` cannot be pickled.
    """
    if isinstance(value, str):
        return value
    try:
        num_bytes = len(cloudpickle.dumps(value))
    except Exception as error:  # the operator's own code may raise anything
        raise ConfigurationError(
            f"{name}, a {type(value).__name__}, cannot be sent to Ray's actors "
            f"({type(error).__name__}: {error}); name a file, or module:factory"
        ) from error
    return value if num_bytes < MAX_INLINE_BYTES else ray.put(value)
