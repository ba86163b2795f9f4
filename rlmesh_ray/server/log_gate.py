"""Has whatever a call logs carry the endpoint's name and the session's."""

from collections.abc import Awaitable, Callable

from rlmesh_ray.protocol.capabilities import SESSION_METADATA_KEY
from rlmesh_ray.rpc import grpc
from rlmesh_ray.server.log_context import enter, short_name

_OPENING = frozenset({"Join", "Process"})


class LogGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Lets every call through, and names it.

    A call has a task of its own, in which interceptors and handler run: so nothing needs to be
    undone at its end.

    Args:
        endpoint_id: The endpoint's name.
    """

    def __init__(self, endpoint_id: str) -> None:
        self._endpoint_id = endpoint_id

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Name the call, by the session that it opens or belongs to."""
        metadata = dict(details.invocation_metadata or ())
        session_id = str(metadata.get(SESSION_METADATA_KEY, ""))
        is_session = bool(session_id) or details.method.rpartition("/")[2] in _OPENING
        enter(self._endpoint_id, short_name(session_id) if is_session else "")
        return await continuation(details)
