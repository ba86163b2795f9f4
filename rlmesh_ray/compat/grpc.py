"""Private parts of grpcio.

``grpc._channel`` and ``grpc._cython`` (``single_threaded_call``) save a third of a round trip.
Without them clients use gRPC's own calls, which have two threads each.

``_cython_call`` of an asyncio call keeps the status with which an endpoint ends a call while a
gateway sends it a message. Without it the client gets another status for some of those calls.
"""

import sys
from collections.abc import Awaitable, Callable
from typing import Any

from rlmesh_ray.grpc_setup import grpc


def begin_single_threaded_call(
    channel: grpc.Channel, path: str, metadata: tuple[tuple[str, str], ...]
) -> Any:
    """Begin a bidirectional call without threads of gRPC; None: not with this gRPC.

    Args:
        channel: Over which; without interceptors.
        path: Of the RPC.
        metadata: What the call carries.
    """
    if sys.platform != "linux":
        return None
    try:
        from rlmesh_ray.compat.single_threaded_call import SingleThreadedCall

        return SingleThreadedCall.begin(channel, path, metadata)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


def message_writer(call: Any) -> Callable[[bytes], Awaitable[None]]:
    """Return what sends a message of an asyncio call.

    ``call.write`` replaces the status of a call that the server has just ended.
    """
    parts = getattr(call, "_cython_call", None)
    write: Callable[[bytes], Awaitable[None]]
    write = getattr(parts, "send_serialized_message", None) or call.write
    return write
