"""Drives one session's worker from the event loop: deadlines, crashes, replacement."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlmesh_ray.envs.commands import (
    Command,
    RenderCommand,
    RenderReply,
    Reply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CodecError, EnvStartError
from rlmesh_ray.protocol.messages import EnvRequest, Render, Reset, Step
from rlmesh_ray.protocol.outcomes import (
    EnvOutcome,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    StepOutcome,
)
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.rlmesh_v1 import values


@dataclass(frozen=True, slots=True)
class _Deadline:
    """Until when a request must be answered."""

    timeout_ms: int
    at_s: float | None
    """In the loop's time; None: never."""

    @classmethod
    def after(cls, timeout_ms: int) -> Self:
        now_s = asyncio.get_running_loop().time()
        return cls(timeout_ms, now_s + timeout_ms / 1000 if timeout_ms > 0 else None)


class EnvHost:
    """The environment of one session.

    Args:
        pool: Where workers come from.
        worker: The session's first one.
        contract: What the endpoint promised.
    """

    def __init__(self, pool: WorkerPool, worker: WorkerProcess, contract: EnvContract) -> None:
        self._pool = pool
        self._worker = worker
        self._contract = contract
        self._is_idle = True
        self._is_released = False

    async def run(self, request: EnvRequest) -> EnvOutcome:
        """Do what a legal ``request`` asks; what goes wrong comes back as a Failure."""
        match request:
            case Reset():
                return await self._reset(request, _Deadline.after(request.timeout_ms))
            case Step():
                return await self._step(request, _Deadline.after(request.timeout_ms))
            case Render():
                return await self._render(_Deadline.after(request.timeout_ms))
        raise AssertionError(f"the session lets no {type(request).__name__} through")

    def release(self) -> None:
        """Give the worker back; one that is still computing is killed, not waited for.

        Idempotent. What remains to be done goes on by itself, so that the cancellation of a
        stream cannot cut it short.
        """
        if self._is_released:
            return
        self._is_released = True
        if not self._is_idle:
            self._worker.kill()
        self._pool.release(self._worker, is_reusable=self._is_idle and self._worker.is_alive)

    async def _reset(self, request: Reset, deadline: _Deadline) -> EnvOutcome:
        if not self._worker.is_alive:
            try:
                async with asyncio.timeout_at(deadline.at_s):
                    self._worker = await self._pool.replace(self._worker)
            except TimeoutError:
                # It goes on starting; the next Reset finds it.
                message = f"not started anew within {deadline.timeout_ms} ms"
                return Failure(FailureKind.TIMEOUT, message)
            except EnvStartError as error:
                return Failure(FailureKind.CRASHED, str(error), error.traceback_text)
        command = ResetCommand(
            seeds=request.seeds, options=dict(request.options) or None, lanes=request.env_indices
        )
        reply = await self._call(command, deadline)
        if not isinstance(reply, ResetReply):
            return _as_failure(reply)
        return ResetOutcome(self._observation(reply.text_columns), reply.infos)

    async def _step(self, request: Step, deadline: _Deadline) -> EnvOutcome:
        try:
            text_columns = self._write_action(request.action)
        except CodecError as error:
            return Failure(FailureKind.BAD_ACTION, str(error))
        reply = await self._call(StepCommand(text_columns), deadline)
        if not isinstance(reply, StepReply):
            return _as_failure(reply)
        block = self._worker.results
        return StepOutcome(
            observation=self._observation(reply.text_columns),
            rewards=block.rewards.tolist(),
            terminated=block.terminated.tobytes(),
            truncated=block.truncated.tobytes(),
            infos=reply.infos,
            final_infos=reply.final_infos,
        )

    async def _render(self, deadline: _Deadline) -> EnvOutcome:
        if not self._worker.is_alive:
            return RenderOutcome(None)
        reply = await self._call(RenderCommand(), deadline)
        return RenderOutcome(reply.png) if isinstance(reply, RenderReply) else _as_failure(reply)

    async def _call(self, command: Command, deadline: _Deadline) -> Reply | Failure:
        worker = self._worker
        if worker.fileno() < 0:
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        self._is_idle = False
        worker.submit(command)
        in_time = await _readable(worker.fileno(), deadline.at_s)
        self._is_idle = True
        if not in_time:
            # Its result must never reach anyone, and a busy environment cannot be asked to stop.
            worker.kill()
            return Failure(FailureKind.TIMEOUT, f"no result within {deadline.timeout_ms} ms")
        reply = worker.receive()
        if isinstance(reply, Failure) and reply.kind is FailureKind.CRASHED:
            worker.kill()
        return reply

    def _write_action(self, action: bytes) -> tuple[tuple[str, ...], ...]:
        """Put the array columns into the worker's block; return the text columns."""
        columns = values.decode_batch(self._contract.action_space, action, self._contract.num_envs)
        texts = []
        for target, column in zip(self._worker.action_columns, columns, strict=True):
            if isinstance(column, tuple):
                texts.append(column)
            else:
                target[...] = column  # type: ignore[index]  # array leaves have array columns
        return tuple(texts)

    def _observation(self, text_columns: Sequence[tuple[str, ...]]) -> bytes:
        texts = iter(text_columns)
        columns: list[Column] = [
            next(texts) if isinstance(column, tuple) else column
            for column in self._worker.observation_columns
        ]
        return values.encode_batch(
            self._contract.observation_space, columns, self._contract.num_envs
        )


def _as_failure(reply: Any) -> Failure:
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")


async def _readable(descriptor: int, deadline_s: float | None) -> bool:
    """Wait until ``descriptor`` can be read; return False if the loop's time passed first."""
    loop = asyncio.get_running_loop()
    arrival = loop.create_future()
    timer = loop.call_at(deadline_s, _settle, arrival, False) if deadline_s else None
    loop.add_reader(descriptor, _settle, arrival, True)
    try:
        return bool(await arrival)
    finally:
        loop.remove_reader(descriptor)
        if timer is not None:
            timer.cancel()


def _settle(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
