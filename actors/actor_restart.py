"""Restarts of actors by Ray: detection, the former address, and arguments that survive them."""

import logging
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import cloudpickle
import ray
from ray.util.annotations import RayDeprecationWarning

from rlmesh_ray.errors import AddressError, ConfigurationError

_LOG = logging.getLogger(__name__)

MAX_INLINE_BYTES = 64 * 1024
"""Largest argument that Ray keeps with the actor; Ray's own limit is 100 KiB."""
_ADDRESS_RETRY_S = 0.5

ServerT = TypeVar("ServerT")


def is_restarted() -> bool:
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():
        # Ray's property uses a deprecated one of Ray's own; each actor would print the warning.
        warnings.filterwarnings("ignore", "(?s).*get_actor_id", RayDeprecationWarning)
        return bool(context.was_current_actor_reconstructed)


def start_server(start: Callable[[], ServerT]) -> ServerT:
    """Start a server in the constructor of its actor; return it.

    Raises:
        RlmeshError: ``start`` failed. After a restart an address in use is no failure: the former
            process may still hold it, and this waits for it.
    """
    is_back = is_restarted()
    while True:
        try:
            return start()
        except AddressError as error:
            if not is_back:
                raise
            _LOG.warning("the server cannot listen again yet: %s", error)
            time.sleep(_ADDRESS_RETRY_S)


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
