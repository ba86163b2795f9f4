"""Calls into the environments of a session's lanes."""

from typing import Any

from rlmesh_ray.client.channel import Metadata, translate_grpc_error
from rlmesh_ray.errors import (
    CodecError,
    EndpointLostError,
    RemoteEnvError,
    RemoteProtocolError,
)
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol.client_session import with_client_timeout
from rlmesh_ray.wire import lane_calls_v1 as wire
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall


def call_lanes(
    channel: grpc.Channel, call: LaneCall, metadata: Metadata, address: str, timeout_s: float
) -> tuple[Any, ...]:
    """Make ``call`` and return its results.

    Args:
        channel: Channel to the endpoint.
        call: The call.
        metadata: The metadata of the session's Join.
        address: For error messages.
        timeout_s: How long to wait.

    Raises:
        CodecError: An argument cannot travel; nothing was sent.
        RemoteEnvError: The environment raised, or the endpoint refused.
        EndpointError: No answer came; the class says why.
    """
    data = wire.pack_call(call)
    try:
        reply = channel.unary_unary(wire.CALL)(data, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.NOT_FOUND:
            raise EndpointLostError("the session is not open any more", address) from error
        raise translate_grpc_error(error, address, is_open=True) from error
    try:
        results = wire.parse_response(reply)
    except CodecError as error:
        raise RemoteProtocolError(f"the answer to a call does not decode: {error}") from error
    if isinstance(results, CallFailed):
        # The endpoint's timeout is a little shorter than the one that the user has set.
        message = with_client_timeout(results.message, call.timeout_ms, timeout_s)
        raise RemoteEnvError(results.code.name, message, True, results.debug_info)
    return results
