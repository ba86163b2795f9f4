"""The gRPC service for calls into the environments of open sessions (LaneService).

Rule 1: calls and requests of a session take turns, so that a call falls between steps.
Rule 2: a name that the operator has not allowed never reaches an environment.
"""

import asyncio
import keyword
import math
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from rlmesh_ray.errors import CodecError, ConfigurationError
from rlmesh_ray.grpc_setup import grpc
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.env_session import EDITION_2026_06_RULES
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.protocol.outcomes import Failure
from rlmesh_ray.server.drain import Drain
from rlmesh_ray.server.env_executor import EnvExecutor
from rlmesh_ray.server.error_text import parsed
from rlmesh_ray.server.session_worker import Deadline
from rlmesh_ray.wire import lane_calls_v1 as wire
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall

T = TypeVar("T")
Outcome = tuple[object, ...] | CallFailed | None
"""The results, or the error; None: the session has ended."""

_LONGEST_QUOTE = 80
_LONGEST_NAME = 200
# Only the session's own requests may do these.
_RESERVED = frozenset({"reset", "step", "close"})


def checked_names(names: Collection[str]) -> tuple[str, ...]:
    """Return ``names``, each once, if clients may be allowed to call them.

    Raises:
        ConfigurationError: A name is private, not an attribute name, or reserved for the session.
    """
    if isinstance(names, str):
        raise ConfigurationError(f"allow_calls={names!r} must be several names: ({names!r},)")
    for name in names:
        if not isinstance(name, str) or not _is_name(name):
            raise ConfigurationError(
                f"allow_calls names {name!r}, which is no public attribute; give names such as "
                "'set_task', without underscore, dots or brackets"
            )
        if name in _RESERVED:
            raise ConfigurationError(
                f"allow_calls names {name!r}, which belongs to the session; clients have it already"
            )
    return tuple(dict.fromkeys(names))


def _is_name(name: str) -> bool:
    is_short = len(name) <= _LONGEST_NAME
    is_attribute = name.isidentifier() and not keyword.iskeyword(name)
    return is_short and is_attribute and not name.startswith("_")


class SessionScheduler:
    """Runs a session's requests, calls and observations by turns; in the serving loop.

    Args:
        executor: The executor of the session's environment.
    """

    def __init__(self, executor: EnvExecutor) -> None:
        self._executor = executor
        self._turn = asyncio.Lock()
        self._num_answered = 0
        self._progress = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._observations: set[asyncio.Task[Any]] = set()
        self.num_calls = 0
        """How many calls have come."""
        self._current: asyncio.Task[Any] | None = None
        self._is_closed = False

    @property
    def is_called(self) -> bool:
        """Whether a call is in progress, or waits for its turn."""
        return bool(self._calls)

    @property
    def is_observed(self) -> bool:
        """Whether work for an observer is in progress, or waits for its turn."""
        return bool(self._observations)

    async def run_request(
        self, answer: Callable[[float], Awaitable[T]], timeout_s: Callable[[], float] = float
    ) -> T:
        """Answer the next request of the session; no call runs meanwhile.

        Args:
            answer: Answers the request, given the seconds that it has waited: infinity if its
                deadline has passed. Then it must not use the environment.
            timeout_s: Returns the timeout of the request; 0: none.
        """
        arrived_s = time.monotonic()
        has_turn = await self._gets_turn(timeout_s() if self._turn.locked() else 0.0)
        try:
            return await answer(time.monotonic() - arrived_s if has_turn else math.inf)
        finally:
            if has_turn:
                self._turn.release()
            self._num_answered += 1
            self._progress.set()

    async def _gets_turn(self, timeout_s: float) -> bool:
        """Wait for the turn; return whether it has come in time."""
        try:
            async with asyncio.timeout(timeout_s or None):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    async def run_between_requests(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do ``work`` between requests and calls."""
        async with self._turn:
            return await work()

    async def observe(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Do ``work`` for an observer between requests and calls; None: the session has ended."""
        return await self._run(self._observe(work), self._observations)

    async def call(self, call: LaneCall) -> Outcome:
        """Do an allowed ``call`` when its turn has come."""
        self.num_calls += 1
        return await self._run(self._call(call), self._calls)

    async def _run(
        self, work: Coroutine[Any, Any, T | None], running: set[asyncio.Task[Any]]
    ) -> T | None:
        """Do ``work`` until it is done or the session ends; ``running`` has its task meanwhile."""
        task = asyncio.ensure_future(work)
        running.add(task)
        task.add_done_callback(running.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            # The caller is gone. The session's next request must find the worker idle, so work
            # that has begun goes on.
            if task is not self._current:
                task.cancel()
            raise
        return None if task.cancelled() else task.result()

    def close(self) -> None:
        """Cancel waiting calls and refuse new ones; before the executor is released. Idempotent."""
        self._is_closed = True
        for task in (*self._calls, *self._observations):
            task.cancel()

    async def _observe(self, work: Callable[[], Awaitable[T]]) -> T | None:
        async with self._turn:
            self._current = asyncio.current_task()
            try:
                return None if self._is_closed else await work()
            finally:
                self._current = None

    async def _call(self, call: LaneCall) -> Outcome:
        deadline = Deadline.after(call.timeout_ms)
        try:
            async with asyncio.timeout_at(deadline.at_s):
                while not self._has_reached(call.num_requests):
                    self._progress.clear()
                    await self._progress.wait()
                await self._turn.acquire()
        except TimeoutError:
            message = f"not called: still at the requests before it after {call.timeout_ms} ms"
            self._executor.skip(call)
            return CallFailed(EnvErrorCode.BUSY, message)
        self._current = asyncio.current_task()
        try:
            return None if self._is_closed else _outcome(await self._executor.call(call, deadline))
        finally:
            self._current = None
            self._turn.release()
            self._progress.set()

    def _has_reached(self, num_requests: int) -> bool:
        if self._executor.is_numbered:
            return self._executor.has_reached(num_requests)
        return self._num_answered >= num_requests

    def refuse(self, call: LaneCall) -> None:
        """Skip a call that is not allowed."""
        self._executor.skip(call)
        self._progress.set()


class EnvCallService:
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


def _outcome(outcome: tuple[object, ...] | Failure | CallFailed) -> Outcome:
    if not isinstance(outcome, Failure):
        return outcome
    code = EDITION_2026_06_RULES.failures[outcome.kind].code
    return CallFailed(code, outcome.message, outcome.debug_info)


def session_id_of(context: grpc.aio.ServicerContext) -> str:
    """Return the session id in the metadata of a call; empty: none."""
    metadata = dict(context.invocation_metadata() or ())
    return str(metadata.get(capabilities.SESSION_METADATA_KEY, ""))
