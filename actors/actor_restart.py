"""Restarts of actors by Ray: how an actor detects one, and how it gets its former address back."""

import logging
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import ray
from ray.util.annotations import RayDeprecationWarning

from rlmesh_ray.errors import AddressError

_LOG = logging.getLogger(__name__)

_ADDRESS_RETRY_S = 0.5

ServerT = TypeVar("ServerT")


def is_restarted() -> bool:
    """Return whether this is the process of an actor that Ray has restarted."""
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
