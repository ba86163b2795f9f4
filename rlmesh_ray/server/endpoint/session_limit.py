"""The limit of an endpoint's sessions by its process's file descriptors."""

import contextlib
import os
from collections.abc import AsyncIterator

from rlmesh_ray.errors import CapacityError
from rlmesh_ray.grpc_setup import grpc

_FEWEST_SPARE, _MOST_SPARE = 4, 64
"""Descriptors that stay free, to accept connections that are refused, and to read files."""
_SPARE_SHARE = 16
RAISE_LIMITS = "close a session, or have the endpoint's operator allow more (ulimit -n)"
"""The remedy where descriptors are short."""


def require_descriptors(count: int) -> None:
    """Make sure that this process can open ``count`` descriptors, and a few more.

    Raises:
        CapacityError: It cannot.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        num_open = len(os.listdir("/dev/fd")) - 1  # without the one that reads the folder
    except FileNotFoundError:
        return
    except OSError:  # none is left to read the folder with
        num_open = limit
    spare = min(max(limit // _SPARE_SHARE, _FEWEST_SPARE), _MOST_SPARE)
    if num_open + count + spare > limit:
        raise CapacityError(
            f"the endpoint has {num_open} of {limit} file descriptors open, and another session "
            f"needs more than that leaves: {RAISE_LIMITS}"
        )


@contextlib.asynccontextmanager
async def refusing_when_full(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Abort the call with RESOURCE_EXHAUSTED where the block raises CapacityError."""
    try:
        yield
    except CapacityError as error:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
