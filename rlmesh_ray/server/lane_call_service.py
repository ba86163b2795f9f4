"""The gRPC service for calls into the environments of open sessions (LaneService).

A name that the operator has not allowed never reaches an environment. Calls take turns with the
session's requests; see ``session_scheduler``.
"""

from rlmesh_ray.errors import CodecError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_executor import EnvExecutor
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.session_limit import refusing_when_full
from rlmesh_ray.server.session_scheduler import Outcome, SessionScheduler
from rlmesh_ray.wire import lane_calls_v1 as wire
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall

_LONGEST_QUOTE = 80


class LaneCallService:
    """Answers LaneService, for the sessions of one EnvService. For the serving loop.

    Args:
        allowed: From ``checked_names``; if empty, the service does not exist.
        num_lanes: Width of each session.
        drain: Counts the pending calls.
    """

    def __init__(self, allowed: tuple[str, ...], num_lanes: int, drain: Drain) -> None:
        self._allowed = allowed
        self._num_lanes = num_lanes
        self._drain = drain
        self._open: dict[str, SessionScheduler] = {}

    @property
    def able(self) -> dict[str, str]:
        """The capability to offer; empty if no name is allowed."""
        return {capabilities.LANE_CALLS: ",".join(self._allowed)} if self._allowed else {}

    def handlers(self) -> list[grpc.ServiceRpcHandler]:
        """Return the handlers for a gRPC server."""
        if not self._allowed:
            return []
        call = grpc.unary_unary_rpc_method_handler(self.call)
        return [grpc.method_handlers_generic_handler(wire.SERVICE, {"Call": call})]

    def open(self, context: grpc.aio.ServicerContext, executor: EnvExecutor) -> SessionScheduler:
        """Accept calls into the session of a Join, until ``close``."""
        session = SessionScheduler(executor)
        session_id = session_id_of(context)
        if session_id:
            # A second stream with the same id is a replay.
            self._open.setdefault(session_id, session)
        return session

    def close(self, context: grpc.aio.ServicerContext, session: SessionScheduler) -> None:
        """End what ``open`` began. Idempotent."""
        session.close()
        session_id = session_id_of(context)
        if self._open.get(session_id) is session:
            del self._open[session_id]

    async def call(self, data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        """Answer a call into the lanes of the session that the metadata name."""
        call = parsed(wire.parse_call, data)
        del data
        if isinstance(call, CodecError):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(call))
            raise AssertionError("abort raises")
        session = self._open.get(session_id_of(context))
        outcome: Outcome = None
        if session is not None:
            with self._drain.request_in_progress():
                outcome = self._objection(call)
                if outcome is None:
                    async with refusing_when_full(context):
                        outcome = await session.call(call)
                else:
                    session.refuse(call)
        if outcome is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such session is open")
            raise AssertionError("abort raises")
        return wire.pack_response(outcome)

    def _objection(self, call: LaneCall) -> CallFailed | None:
        """Return the error of a call with invalid arguments."""
        if call.name not in self._allowed:
            return CallFailed(
                EnvErrorCode.INVALID_ACTION,
                f"{call.name[:_LONGEST_QUOTE]!r} may not be called; the operator of this endpoint "
                f"allows {', '.join(self._allowed)} (allow_calls=…, --allow-call)",
            )
        lanes = call.lanes
        if len(lanes) > len(set(lanes)) or not set(lanes) <= set(range(self._num_lanes)):
            return CallFailed(
                EnvErrorCode.INVALID_ACTION,
                f"lanes {list(lanes[:_LONGEST_QUOTE])} are not all different and in "
                f"[0, {self._num_lanes})",
            )
        return None


def session_id_of(context: grpc.aio.ServicerContext) -> str:
    """Return the session id in the metadata of a call; empty: none."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(capabilities.SESSION_METADATA_KEY, ""))
