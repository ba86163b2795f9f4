"""The gRPC service that hands out tickets for direct TCP connections, TransportService."""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.handshake_service import came_through_gateway
from rlmesh_ray.server.lane_call_service import session_id_of
from rlmesh_ray.transport.connection_broker import ConnectionBroker
from rlmesh_ray.wire import transport_v1 as wire


class TicketService:
    """Answers the calls of TransportService.

    Args:
        broker: Knows the open sessions.
    """

    def __init__(self, broker: ConnectionBroker) -> None:
        self._broker = broker

    def handlers(self) -> list[grpc.ServiceRpcHandler]:
        """Return the handlers for a gRPC server; none where TCP connections are not offered."""
        if capabilities.DIRECT_TCP not in self._broker.offered_capabilities:
            return []
        open_tcp = grpc.unary_unary_rpc_method_handler(self.open_tcp)
        return [grpc.method_handlers_generic_handler(wire.SERVICE, {"OpenTcp": open_tcp})]

    async def open_tcp(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Return a ticket for the session that the metadata name."""
        timeout_ms = parsed(wire.parse_request, data)
        if isinstance(timeout_ms, CodecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(timeout_ms))
            raise AssertionError("abort raises")
        if came_through_gateway(context):
            message = "a gateway, which takes no direct connections, stands before this endpoint"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message)
            raise AssertionError("abort raises")
        ticket = self._broker.issue_ticket(session_id_of(context), timeout_ms)
        if ticket is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session is open")
            raise AssertionError("abort raises")
        return wire.pack_response(ticket.ticket_id, ticket.key, ticket.endpoint)
