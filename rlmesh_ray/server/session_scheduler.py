"""Turns of one session: its requests, calls into its lanes, and observers' pictures.

A call or a picture falls between two requests, never into a step.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from rlmesh_ray.protocol.env_session import EDITION_2026_06_RULES
from rlmesh_ray.protocol.failure_effects import Failure
from rlmesh_ray.protocol.messages import EnvErrorCode
from rlmesh_ray.server.env_executor import EnvExecutor
from rlmesh_ray.server.request_deadline import Deadline
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall

T = TypeVar("T")
Outcome = tuple[object, ...] | CallFailed | None
"""The results, or the error; None: the session has ended."""


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


def _outcome(outcome: tuple[object, ...] | Failure | CallFailed) -> Outcome:
    if not isinstance(outcome, Failure):
        return outcome
    code = EDITION_2026_06_RULES.failures[outcome.kind].code
    return CallFailed(code, outcome.message, outcome.debug_info)
