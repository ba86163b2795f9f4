"""Drives one session's worker from the event loop: deadlines, crashes, replacement."""

import asyncio
from collections.abc import Sequence
from typing import Any

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


class EnvHost:
    """The environment of one session.

    Args:
        pool: Where workers come from.
        worker: The session's first one.
        contract: What the endpoint promised.
    """

    def __init__(self, pool: WorkerPool, worker: WorkerProcess, contract: EnvContract) -> None:
        self._pool = pool
        self._worker: WorkerProcess | None = worker
        self._contract = contract
        self._is_idle = True

    async def run(self, request: EnvRequest) -> EnvOutcome:
        """Do what a legal ``request`` asks; what goes wrong comes back as a Failure."""
        match request:
            case Reset():
                return await self._reset(request)
            case Step():
                return await self._step(request)
            case Render():
                return await self._render(request)
        raise AssertionError(f"the session lets no {type(request).__name__} through")

    async def release(self) -> None:
        """Give the worker back; one that is still computing is killed, not waited for."""
        worker, self._worker = self._worker, None
        if worker is not None and not self._is_idle:
            worker.kill()
        await self._pool.release(worker, is_reusable=self._is_idle)

    async def _reset(self, request: Reset) -> EnvOutcome:
        if self._worker is None or not self._worker.is_alive:
            try:
                self._worker = await self._pool.replace(self._worker)
            except EnvStartError as error:
                return Failure(FailureKind.CRASHED, str(error), error.traceback_text)
        command = ResetCommand(
            seeds=request.seeds, options=dict(request.options) or None, lanes=request.env_indices
        )
        reply = await self._call(self._worker, command, request.timeout_ms)
        if not isinstance(reply, ResetReply):
            return _as_failure(reply)
        return ResetOutcome(self._observation(self._worker, reply.text_columns), reply.infos)

    async def _step(self, request: Step) -> EnvOutcome:
        worker = self._worker
        if worker is None:
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        try:
            text_columns = self._write_action(worker, request.action)
        except CodecError as error:
            return Failure(FailureKind.BAD_ACTION, str(error))
        reply = await self._call(worker, StepCommand(text_columns), request.timeout_ms)
        if not isinstance(reply, StepReply):
            return _as_failure(reply)
        block = worker.results
        return StepOutcome(
            observation=self._observation(worker, reply.text_columns),
            rewards=block.rewards.tolist(),
            terminated=block.terminated.tobytes(),
            truncated=block.truncated.tobytes(),
            infos=reply.infos,
            final_infos=reply.final_infos,
        )

    async def _render(self, request: Render) -> EnvOutcome:
        if self._worker is None:
            return RenderOutcome(None)
        reply = await self._call(self._worker, RenderCommand(), request.timeout_ms)
        return RenderOutcome(reply.png) if isinstance(reply, RenderReply) else _as_failure(reply)

    async def _call(
        self, worker: WorkerProcess, command: Command, timeout_ms: int
    ) -> Reply | Failure:
        self._is_idle = False
        worker.submit(command)
        if not await _readable(worker.fileno(), timeout_ms / 1000 if timeout_ms > 0 else None):
            # Its result must never reach anyone, and a busy environment cannot be asked to stop.
            worker.kill()
            self._worker = None
            self._is_idle = True
            return Failure(FailureKind.TIMEOUT, f"no result within {timeout_ms} ms")
        reply = worker.receive()
        self._is_idle = True
        if isinstance(reply, Failure) and reply.kind is FailureKind.CRASHED:
            worker.kill()
            self._worker = None
        return reply

    def _write_action(self, worker: WorkerProcess, action: bytes) -> tuple[tuple[str, ...], ...]:
        """Put the array columns into the worker's block; return the text columns."""
        columns = values.decode_batch(self._contract.action_space, action, self._contract.num_envs)
        texts = []
        for target, column in zip(worker.action_columns, columns, strict=True):
            if isinstance(column, tuple):
                texts.append(column)
            else:
                target[...] = column  # type: ignore[index]  # array leaves have array columns
        return tuple(texts)

    def _observation(self, worker: WorkerProcess, text_columns: Sequence[tuple[str, ...]]) -> bytes:
        texts = iter(text_columns)
        columns: list[Column] = [
            next(texts) if isinstance(column, tuple) else column
            for column in worker.observation_columns
        ]
        return values.encode_batch(
            self._contract.observation_space, columns, self._contract.num_envs
        )


def _as_failure(reply: Any) -> Failure:
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")


async def _readable(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until ``descriptor`` can be read; return False if ``timeout_s`` passed first."""
    loop = asyncio.get_running_loop()
    arrival = loop.create_future()
    timer = loop.call_later(timeout_s, _settle, arrival, False) if timeout_s else None
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
