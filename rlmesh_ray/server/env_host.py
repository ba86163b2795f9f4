"""Drives one session's worker from the event loop: deadlines, crashes, replacement."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlmesh_ray.envs.commands import (
    CallCommand,
    CallReply,
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
from rlmesh_ray.server.loop import in_thread
from rlmesh_ray.server.replies import arrives, take
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.lanes_v1 import LaneCall
from rlmesh_ray.wire.rlmesh_v1 import values

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadline:
    """Until when a request or call must be answered."""

    timeout_ms: int
    at_s: float | None
    """In the loop's time; None: never."""

    @classmethod
    def after(cls, timeout_ms: int) -> Self:
        """Return the time that lies ``timeout_ms`` ahead; 0: never."""
        now_s = asyncio.get_running_loop().time()
        return cls(timeout_ms, now_s + timeout_ms / 1000 if timeout_ms > 0 else None)


class EnvHost:
    """The environment of one session, from the first Reset on.

    Args:
        pool: Where workers come from; it has a place for the session.
        contract: What the endpoint promised.
        grace_s: How long a request may go on after its deadline, for nobody, before its worker
            is killed.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract, grace_s: float) -> None:
        self._pool = pool
        # None: no Reset has got one yet.
        self._worker: WorkerProcess | None = None
        self._contract = contract
        self._grace_s = grace_s
        self._is_idle = True
        # While the worker is busy with what nobody waits for any more.
        self._finishing: asyncio.Task[None] | None = None
        self._is_released = False

    async def run(self, request: EnvRequest) -> EnvOutcome:
        """Do what a legal ``request`` asks; what goes wrong comes back as a Failure."""
        match request:
            case Reset():
                return await self._reset(request, Deadline.after(request.timeout_ms))
            case Step():
                return await self._step(request, Deadline.after(request.timeout_ms))
            case Render():
                return await self._render(Deadline.after(request.timeout_ms))
        raise AssertionError(f"the session lets no {type(request).__name__} through")

    async def call(self, call: LaneCall, deadline: Deadline) -> tuple[object, ...] | Failure:
        """Call into the environment; to be called between requests.

        Before the first Reset it gets a worker, as a Reset would. One that is gone is not replaced:
        a session that has not been told yet would step lanes that nobody has reset.
        """
        ready = self._make_ready if self._worker is None else self._make_idle
        obstacle = await ready(deadline)
        if obstacle is not None:
            return obstacle
        command = CallCommand(call.name, call.arguments, call.lanes)
        reply = await self._call(command, deadline)
        return reply.results if isinstance(reply, CallReply) else _as_failure(reply)

    def release(self) -> None:
        """Give the worker back; one that is still busy is killed, not waited for.

        Idempotent. What remains to be done goes on by itself, so that the cancellation of a
        stream cannot cut it short.
        """
        if self._is_released:
            return
        self._is_released = True
        if self._finishing is not None:
            self._finishing.cancel()
        self._pool.release(self._worker, is_idle=self._is_idle)

    async def _reset(self, request: Reset, deadline: Deadline) -> EnvOutcome:
        obstacle = await self._make_ready(deadline)
        if obstacle is not None:
            return obstacle
        command = ResetCommand(
            seeds=request.seeds, options=dict(request.options) or None, lanes=request.env_indices
        )
        reply = await self._call(command, deadline)
        if not isinstance(reply, ResetReply):
            return _as_failure(reply)
        return ResetOutcome(self._observation(reply.text_columns), reply.infos)

    async def _make_ready(self, deadline: Deadline) -> Failure | None:
        """Make sure that there is an idle worker; return what stands in the way."""
        message = ""
        try:
            async with asyncio.timeout_at(deadline.at_s):
                message = "still busy with an earlier request after"
                await self._finished()
                if self._worker is None or not self._worker.is_alive:
                    message = "the environment has not started within"
                    self._worker = await self._pool.replace(self._worker)
        except TimeoutError:
            # It goes on finishing or starting; the next Reset finds it.
            return Failure(FailureKind.TIMEOUT, f"{message} {deadline.timeout_ms} ms")
        except EnvStartError as error:
            return Failure(FailureKind.CRASHED, str(error), error.traceback_text)
        return None

    async def _make_idle(self, deadline: Deadline) -> Failure | None:
        """Wait for a worker that is still busy; return what stands in the way."""
        try:
            async with asyncio.timeout_at(deadline.at_s):
                await self._finished()
        except TimeoutError:
            message = f"still busy with an earlier request after {deadline.timeout_ms} ms"
            return Failure(FailureKind.TIMEOUT, message)
        return None

    async def _finished(self) -> None:
        """Wait until the worker is idle, or gone."""
        if self._finishing is not None:
            await asyncio.shield(self._finishing)
            self._finishing = None

    async def _step(self, request: Step, deadline: Deadline) -> EnvOutcome:
        if self._finishing is not None:
            return Failure(
                FailureKind.TIMEOUT, "a call has not returned in time; send Reset to start over"
            )
        try:
            worker = self._require_worker()
            text_columns = self._write_action(worker, request.action)
        except CodecError as error:
            return Failure(FailureKind.BAD_ACTION, str(error))
        reply = await self._call(StepCommand(text_columns), deadline)
        if not isinstance(reply, StepReply):
            return _as_failure(reply)
        block = worker.results
        return StepOutcome(
            observation=self._observation(reply.text_columns),
            rewards=block.rewards.tolist(),
            terminated=block.terminated.tobytes(),
            truncated=block.truncated.tobytes(),
            infos=reply.infos,
            final_infos=reply.final_infos,
        )

    async def _render(self, deadline: Deadline) -> EnvOutcome:
        obstacle = await self._make_idle(deadline)
        if obstacle is not None:
            return obstacle
        if self._worker is None or not self._worker.is_alive:
            return RenderOutcome(None)
        reply = await self._call(RenderCommand(), deadline)
        return RenderOutcome(reply.png) if isinstance(reply, RenderReply) else _as_failure(reply)

    async def _call(self, command: Command, deadline: Deadline) -> Reply | Failure:
        worker = self._require_worker()
        if worker.fileno() < 0:
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        self._is_idle = False
        worker.submit(command)
        if not await arrives(worker, deadline.at_s):
            self._finishing = asyncio.ensure_future(self._finish(worker))
            return Failure(FailureKind.TIMEOUT, f"no result within {deadline.timeout_ms} ms")
        reply = await take(worker)
        self._is_idle = True
        if isinstance(reply, Failure) and reply.kind is FailureKind.CRASHED:
            _LOG.warning("%s%s", reply.message, reply.debug_info and f"\n{reply.debug_info}")
        return reply

    async def _finish(self, worker: WorkerProcess) -> None:
        """Let ``worker`` finish late, in vain; kill it when that takes too long.

        A busy environment cannot be asked to stop, and its result must never reach anyone.
        """
        if await arrives(worker, asyncio.get_running_loop().time() + self._grace_s):
            await take(worker)
        else:
            _LOG.warning("still busy %g s after a deadline: the worker is killed", self._grace_s)
            await in_thread(worker.kill)
        self._is_idle = True

    def _require_worker(self) -> WorkerProcess:
        assert self._worker is not None, "the session lets no Step through before a Reset is done"
        return self._worker

    def _write_action(self, worker: WorkerProcess, action: bytes) -> tuple[tuple[str, ...], ...]:
        """Put the array columns into the block of ``worker``; return the text columns."""
        columns = values.decode_batch(self._contract.action_space, action, self._contract.num_envs)
        texts = []
        for target, column in zip(worker.action_columns, columns, strict=True):
            if isinstance(column, tuple):
                texts.append(column)
            else:
                target[...] = column  # type: ignore[index]  # array leaves have array columns
        return tuple(texts)

    def _observation(self, text_columns: Sequence[tuple[str, ...]]) -> bytes:
        texts = iter(text_columns)
        columns: list[Column] = [
            next(texts) if isinstance(column, tuple) else column
            for column in self._require_worker().observation_columns
        ]
        return values.encode_batch(
            self._contract.observation_space, columns, self._contract.num_envs
        )


def _as_failure(reply: Any) -> Failure:
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")
