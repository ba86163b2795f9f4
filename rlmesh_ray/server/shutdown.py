"""Shutdown: whether a client may stop an endpoint, and what a Shutdown call does.

Only a client of a server with ``allow_shutdown=True`` may. The endpoint sends the answer, finishes
the outstanding requests, and stops.
"""

import logging
from collections.abc import Callable

from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.wire.rlmesh_v1.handshake import ShutdownRequest, ShutdownResponse

_LOG = logging.getLogger(__name__)

_REFUSAL = (
    "clients may not shut this endpoint down; its operator can allow it with allow_shutdown=True "
    "(--allow-shutdown)"
)


def answer_shutdown(
    request: ShutdownRequest,
    context: grpc.aio.ServicerContext,
    stop: Callable[[], None] | None,
    obstacle: str,
) -> ShutdownResponse:
    """Return the answer to a client's Shutdown; call ``stop`` after it, if that is allowed.

    Args:
        request: The client's request.
        context: The call.
        stop: Begins to stop the endpoint; None: clients may not.
        obstacle: Why the endpoint serves no client of this dialect; empty: it does.
    """
    if stop is None or obstacle:
        _LOG.info("a client's Shutdown was refused (reason given: %.200r)", request.reason)
        return ShutdownResponse(accepted=False, message=obstacle or _REFUSAL)
    _LOG.warning("a client's Shutdown stops the endpoint (reason given: %.200r)", request.reason)
    context.add_done_callback(lambda _: stop())
    return ShutdownResponse(accepted=True, message="stopping after the outstanding requests")
