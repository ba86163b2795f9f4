"""Arguments of actors that are still there when Ray restarts them."""

import cloudpickle
import ray

from rlmesh_ray.errors import ConfigurationError

MAX_INLINE_BYTES = 64 * 1024
"""Of an argument that Ray keeps itself; its own limit is 100 KiB."""


def durable(name: str, value: object) -> object:
    """Return ``value`` as an argument that lasts for as long as somebody holds what is returned.

    Ray keeps small arguments with the actor. What lies in its object store is kept alive by
    whoever holds the reference, and by nobody else.

    Args:
        name: Of the value, for error messages.
        value: Text is small, and returned as it is.

    Raises:
        ConfigurationError: It cannot be pickled.
    """
    if isinstance(value, str):
        return value
    try:
        num_bytes = len(cloudpickle.dumps(value))
    except Exception as error:  # whatever the operator's own code raises
        raise ConfigurationError(
            f"{name}, a {type(value).__name__}, cannot be sent to Ray's actors "
            f"({type(error).__name__}: {error}); name a file, or module:factory"
        ) from error
    return value if num_bytes < MAX_INLINE_BYTES else ray.put(value)
