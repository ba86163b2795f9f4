"""Asks an endpoint, by gRPC, for what lets a direct TCP connection in."""

from rlmesh_ray.client.channel import Dial, Metadata, translate
from rlmesh_ray.errors import CodecError, EndpointClosedError, EndpointError, RemoteProtocolError
from rlmesh_ray.rpc import grpc
from rlmesh_ray.transport.tcp import KEY_BYTES, TICKET_ID_BYTES, Ticket
from rlmesh_ray.wire import transport_v1 as wire


def ask_for_ticket(
    dial: Dial, channel: grpc.Channel, session: Metadata, timeout_ms: int, timeout_s: float
) -> Ticket:
    """Return a ticket for a connection to the worker of a session.

    Args:
        dial: The endpoint.
        channel: To it.
        session: What names the session.
        timeout_ms: What its steps may take.
        timeout_s: How long to wait.

    Raises:
        EndpointError: No answer came, or the endpoint refuses; the message says why.
        RemoteProtocolError: The answer is no ticket.
    """
    request = wire.pack_request(timeout_ms)
    try:
        reply = channel.unary_unary(wire.OPEN_TCP)(
            request, timeout=timeout_s, metadata=dial.metadata + session
        )
    except ValueError as error:  # gRPC's, for a channel that was closed meanwhile
        raise EndpointClosedError("the session is closed", dial.address) from error
    except grpc.RpcError as error:
        code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
        if code is grpc.StatusCode.UNAVAILABLE:
            raise translate(error, dial.address, is_open=True) from error
        details = error.details() if isinstance(error, grpc.Call) else error
        reason = f"the endpoint lets none in ({code.name}: {details})"
        raise EndpointError(reason, dial.address) from error
    try:
        return Ticket(*wire.parse_response(reply, TICKET_ID_BYTES, KEY_BYTES))
    except CodecError as error:
        raise RemoteProtocolError(f"the answer is no ticket: {error}") from error
