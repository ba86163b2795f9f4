"""One connection of an openpi client: a session with one route of one lane."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode

from rlmesh_ray.dialects.openpi.wire import space_maps
from rlmesh_ray.dialects.openpi.wire.msgpack_arrays import pack
from rlmesh_ray.errors import CodecError, RlmeshError
from rlmesh_ray.protocol.messages import BatchRun, PredictSlot
from rlmesh_ray.protocol.model_session import ContractLanes
from rlmesh_ray.server.batch_schema import Actions, PredictionRequest
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.log_context import enter, short_name
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.server.model_routes import ModelRoutes, Route
from rlmesh_ray.server.model_stream import failure_response
from rlmesh_ray.server.session_log import SessionLog
from rlmesh_ray.spaces.contract import EnvContract

_LOG = logging.getLogger(__name__)

_ROUTE = "openpi"
_SLOTS = (PredictSlot(0, "", 0, False),)
_SEND_S = 30.0
"""How long a client may take to receive an answer."""
_MAX_REASON_CHARACTERS = 30
_CLOSED = (
    CloseCode.NORMAL_CLOSURE,
    CloseCode.GOING_AWAY,
    CloseCode.NO_STATUS_RCVD,
    CloseCode.ABNORMAL_CLOSURE,
)
"""Codes of connections that a client has closed. openpi's own client sends none when it exits."""
_FAULT = "a fault of the server, which its log has, ended this session; connect again"


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """What all connections of a port share."""

    host: ModelHost
    contract: EnvContract
    """Has the spaces of the clients, for one lane."""
    metadata: Callable[[], dict[str, Any]]
    """Returns what the server sends first."""
    drain: Drain
    endpoint_id: str
    idle_timeout_s: float | None


class _Gone(Exception):
    """The client has closed the connection, or the endpoint has."""


class OpenpiConnection:
    """Answers one client, in the task of its connection.

    Args:
        policy: The policy.
        connection: Its opening handshake is done.
    """

    def __init__(self, policy: ServedPolicy, connection: ServerConnection) -> None:
        self.is_busy = False
        """Whether a request waits for its answer."""
        self.transport = connection.transport
        """The connection's transport."""
        self._policy = policy
        self._connection = connection
        self._num_predicted = 0
        self._is_refused = self._is_idle = self._has_failed = False
        host, port, *_ = connection.remote_address or ("an unknown host", 0)
        self._peer = f"{host}:{port}"

    async def serve(self) -> None:
        """Answer each request, one at a time, until either side closes the connection."""
        enter(self._policy.endpoint_id, short_name(""))
        host = self._policy.host
        routes = ModelRoutes(
            host, lambda each: ContractLanes(each.num_envs), lambda _: space_maps, keeps_same=False
        )
        host.sessions.note_opened()
        log = SessionLog(
            host.sessions, self._peer, "openpi", lambda: {"predictions": self._num_predicted}
        )
        gone = asyncio.ensure_future(self._connection.wait_closed())
        try:
            await routes.configure(_ROUTE, self._policy.contract, host.horizon, 1)
            await self._send(pack(self._policy.metadata()))
            await self._answer_all(routes.by_id[_ROUTE], gone)
        except RlmeshError as error:
            failed = failure_response("", error)
            host.sessions.note_error(failed.code.name)
            _LOG.info("client %s is sent an error: %s", self._peer, failed.message)
            self._is_refused = True
            await self._refuse(failed.message)
        except (_Gone, ConnectionClosed, OSError, TimeoutError):
            self.transport.abort()
        except Exception:  # noqa: BLE001  # all other sessions go on
            _LOG.exception("a session of an openpi client has failed; please report this")
            self._has_failed = True
            await self._refuse(_FAULT)
        finally:
            gone.cancel()
            host.sessions.note_ended()
            log.end(
                is_closed=self._is_refused or self._has_left_between_requests,
                is_idle=self._is_idle,
                is_stopping=self._policy.drain.is_draining,
                has_failed=self._has_failed,
            )
            await routes.abandon()

    @property
    def _has_left_between_requests(self) -> bool:
        return not self.is_busy and self._connection.close_code in _CLOSED

    async def close(self) -> None:
        """Close the connection, because the endpoint stops."""
        await self._connection.close(CloseCode.GOING_AWAY, "the endpoint stops")

    async def _answer_all(self, route: Route, gone: "asyncio.Future[None]") -> None:
        drain, total_ms = self._policy.drain, None
        while not drain.is_draining:
            message = await self._received()
            if message is None:
                return
            begun_s = time.perf_counter()
            self.is_busy = True
            with drain.request_in_progress():
                answer = await self._predict(route, message, gone, total_ms)
                await self._send(answer)
            self.is_busy = False
            self._num_predicted += 1
            total_ms = (time.perf_counter() - begun_s) * 1e3
        await self.close()

    async def _received(self) -> bytes | None:
        """Return the next message; None: the client was silent for too long."""
        try:
            async with asyncio.timeout(self._policy.idle_timeout_s):
                message = await self._connection.recv()
        except TimeoutError:
            self._is_idle = True
            await self._connection.close(
                CloseCode.POLICY_VIOLATION, f"no request for {self._policy.idle_timeout_s:g} s"
            )
            return None
        if isinstance(message, str):
            raise CodecError(
                "an observation is a binary message, a map in msgpack; this one is text"
            )
        return message

    async def _predict(
        self,
        route: Route,
        message: bytes,
        gone: "asyncio.Future[None]",
        previous_total_ms: float | None,
    ) -> bytes:
        """Return the result for an observation.

        Raises:
            RlmeshError: There is none.
        """
        answered: asyncio.Future[tuple[Actions | RlmeshError, BatchRun, int]]
        answered = asyncio.get_running_loop().create_future()

        def answer(result: Actions | RlmeshError, run: BatchRun, queue_ns: int) -> None:
            if not answered.done():
                answered.set_result((result, run, queue_ns))

        request = PredictionRequest(route.schema, message, route.key, _SLOTS, route.values, answer)
        # Together with the requests of all other sessions that come at the same time.
        self._policy.host.submit(lambda _data: self._take(request, answered), message)
        either: set[asyncio.Future[Any]] = {answered, gone}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise _Gone
        finally:
            if answered.cancel():
                self._policy.host.cancel(request)
        result, run, queue_ns = answered.result()
        if isinstance(result, RlmeshError):
            raise result
        timing: dict[str, object] = {
            "infer_ms": run.forward_ns * 1e-6,
            "queue_ms": queue_ns * 1e-6,
            "batch_rows": run.num_rows,
            "policy_version": run.policy_version,
        }
        if previous_total_ms is not None:
            timing["prev_total_ms"] = previous_total_ms
        steps = result if isinstance(result, tuple) else (result,)
        return space_maps.codec(route.schema.contract.action_space).result(steps, timing)

    def _take(self, request: PredictionRequest, answered: "asyncio.Future[Any]") -> None:
        if answered.done():
            return
        try:
            self._policy.host.predict(request)
        except Exception as error:  # noqa: BLE001  # it must not raise: other sessions go on
            answered.set_exception(error)

    async def _refuse(self, reason: str) -> None:
        """Send why the connection ends, as text, and close it."""
        try:
            await self._send(reason)
            short = reason[:_MAX_REASON_CHARACTERS]
            await self._connection.close(CloseCode.INTERNAL_ERROR, short)
        except (ConnectionClosed, OSError, TimeoutError):
            self.transport.abort()

    async def _send(self, message: bytes | str) -> None:
        async with asyncio.timeout(_SEND_S):
            await self._connection.send(message)
