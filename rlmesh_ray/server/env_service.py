"""The shell of EnvService: bytes in, session, host, bytes out.

Handlers take raw bytes, so that a malformed frame is answered in band instead of breaking
the stream.
"""

import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from rlmesh_ray.envs.lent_line import LentLine
from rlmesh_ray.errors import CapacityError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.env_session import EnvSession, State
from rlmesh_ray.protocol.messages import EnvResponse, ResetDone
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_calls import EnvCalls, session_id_of
from rlmesh_ray.server.env_host import EnvHost
from rlmesh_ray.server.line_desk import LineDesk
from rlmesh_ray.server.reception import HouseRules, Reception
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.wire.rlmesh_v1 import env as wire

SERVICE = "rlmesh.env.v1.EnvService"
_ABLE = {
    capabilities.ENV_SERVICE: "",
    capabilities.SPACES_CORE: "",
    capabilities.NDARRAY: "",
    capabilities.PARTIAL_RESET: "",
}
_STOPPING = "the endpoint is stopping"
_SAME_STEP_REFUSAL = (
    "this environment resets its lanes within the step that ends an episode (autoreset mode "
    "SAME_STEP), which edition 2026.06 reserves and this client does not know: serve it with "
    f"NEXT_STEP or DISABLED, or use a client that offers the capability {capabilities.SAME_STEP}"
)


@dataclass(frozen=True, slots=True)
class SideDoors:
    """What the clients of open sessions have besides their streams."""

    calls: EnvCalls
    """Where they reach into their lanes."""
    desk: LineDesk
    """Where those on this machine get lines."""


class EnvService:
    """Answers the three calls of EnvService.

    Args:
        pool: Started; where sessions get their workers.
        contract: What the endpoint promises.
        step_grace_s: See ``EnvServer``.
        rules: What clients may do.
        drain: The endpoint's.
        doors: Open to the clients of its sessions.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        step_grace_s: float,
        rules: HouseRules,
        drain: Drain,
        doors: SideDoors,
    ) -> None:
        self._pool = pool
        self._contract = contract
        self._step_grace_s = step_grace_s
        self._drain = drain
        self._calls, self._desk = doors.calls, doors.desk
        # The edition reserves this mode: a client that does not know it would take the first
        # observation of the next episode for the last one of this, and learn from it.
        self._is_same_step = contract.autoreset_mode is AutoresetMode.SAME_STEP
        own = {capabilities.SAME_STEP: ""} if self._is_same_step else {}
        able = {**_ABLE, **own, **doors.calls.able, **doors.desk.able}
        self._reception = Reception(wire, able, rules, contract)

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what a gRPC server dispatches to."""
        return self._reception.handlers(SERVICE, self.join)

    async def join(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        """Serve one session: one response for each request, in arrival order."""
        # Some clients wait for the headers before they send anything (rlmesh 0.1.0b3 does).
        await context.send_initial_metadata(())
        offered = self._reception.capabilities_of(context)
        if self._is_same_step and capabilities.SAME_STEP not in offered:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _SAME_STEP_REFUSAL)
        try:
            await self._pool.reserve()
        except CapacityError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, error.message)
        host = EnvHost(self._pool, self._contract, self._step_grace_s)
        session = EnvSession(self._contract.num_envs, _new_episode_id)
        lanes = self._calls.open(context, host)
        tags = capabilities.NDARRAY in offered
        leave_desk: Callable[[], None] = _nothing
        if capabilities.SHARED_MEMORY in offered:
            leave_desk = self._desk.open(
                session_id_of(context),
                lambda timeout_ms: lanes.between(
                    partial(_lend_line, session, host, timeout_ms, tag_arrays=tags)
                ),
                lambda: lanes.between(host.end_line),
            )
        try:
            async for data in requests:
                self._drain.owe()
                try:
                    response = await lanes.in_turn(partial(_answer, session, host, data))
                    if session.state is State.CLOSED:
                        leave_desk()
                        self._calls.close(context, lanes)
                        # Before the answer: whoever reads it may open the next session at once.
                        host.release()
                    await context.write(wire.pack_response(response, tag_arrays=tags))
                finally:
                    self._drain.settle()
                if session.state is State.CLOSED:
                    break
                if self._drain.is_wanted:
                    # Not an orderly end: there may be requests that were never taken.
                    await context.abort(grpc.StatusCode.UNAVAILABLE, _STOPPING)
        finally:
            session.interrupt(time.time_ns())
            leave_desk()
            self._calls.close(context, lanes)
            host.release()


async def _answer(session: EnvSession, host: EnvHost, data: bytes) -> EnvResponse:
    request = wire.parse_request(data)
    refusal = session.receive(request, time.time_ns())
    if refusal is not None:
        return refusal
    outcome = await host.run(request)  # type: ignore[arg-type]  # the session refuses Unreadable
    response = session.complete(outcome, time.time_ns())
    if session.state is not State.READY:
        host.track(())
    elif isinstance(response, ResetDone):
        host.track(session.episodes)
    return response


async def _lend_line(
    session: EnvSession, host: EnvHost, timeout_ms: int, *, tag_arrays: bool
) -> LentLine | None:
    if session.state is not State.READY:
        return None
    line = await host.lend_line(timeout_ms, tag_arrays=tag_arrays)
    if line is not None:
        session.share(line.control.tally)
        host.track(session.episodes)
    return line


def _nothing() -> None:
    """Leave a desk where one never was."""


def _new_episode_id() -> str:
    return uuid.uuid4().hex
