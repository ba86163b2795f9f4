"""Servers of actors that Ray restarts come back, at the address that they had if it is theirs."""

import logging
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import ray
from ray.util.annotations import RayDeprecationWarning

from rlmesh_ray.errors import AddressError, RlmeshError

_LOG = logging.getLogger(__name__)

_ADDRESS_RETRY_S = 0.5
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
"""Between attempts to serve again after a restart."""

ServerT = TypeVar("ServerT")


def is_restarted() -> bool:
    """Tell whether this process is that of an actor which Ray has restarted."""
    if not ray.is_initialized():
        return False
    context = ray.get_runtime_context()
    if context.get_actor_id() is None:
        return False
    with warnings.catch_warnings():
        # Ray's own property asks a deprecated one of Ray's, and each actor would print that.
        warnings.filterwarnings("ignore", "(?s).*get_actor_id", RayDeprecationWarning)
        return bool(context.was_current_actor_reconstructed)


def start_server(start: Callable[[], ServerT]) -> ServerT:
    """Start a server in the constructor of its actor; return it.

    Raises:
        RlmeshError: As ``start`` raises it, but for an address that is in use in an actor that has
            been restarted: what is left of its former process may still be ending.
    """
    is_back = is_restarted()
    while True:
        try:
            return start()
        except AddressError as error:
            if not is_back:
                raise
            _LOG.warning("not back yet: %s", error)
            time.sleep(_ADDRESS_RETRY_S)


def retry_start(
    start: Callable[[], ServerT], failure: RlmeshError, note: Callable[[RlmeshError], object]
) -> ServerT:
    """Start the server of an actor that could not serve at once after a restart; return it.

    Nobody waits for it as at the first start, and Ray takes its actor for alive: it is tried again
    and again, less and less often. For a thread of its own.

    Args:
        start: Starts it.
        failure: Why that failed.
        note: Told why it has failed again.
    """
    pause_s = _FIRST_DELAY_S
    while True:
        _LOG.warning("an endpoint cannot serve again yet: %s", failure)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_DELAY_S)
        try:
            return start()
        except RlmeshError as error:
            failure = error
            note(error)
