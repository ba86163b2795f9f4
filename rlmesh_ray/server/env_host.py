"""Drives one session's worker from the event loop: deadlines, crashes, replacement."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from rlmesh_ray.envs.commands import (
    AttachCommand,
    AttachReply,
    CallCommand,
    CallReply,
    Command,
    DetachCommand,
    RenderCommand,
    RenderReply,
    Reply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
    TrackCommand,
    VerdictCommand,
)
from rlmesh_ray.envs.lent_line import LentLine
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CodecError, EnvStartError
from rlmesh_ray.protocol.episodes import Episode
from rlmesh_ray.protocol.messages import EnvRequest, Render, Reset, Step
from rlmesh_ray.protocol.outcomes import (
    EnvOutcome,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    StepOutcome,
)
from rlmesh_ray.server.line_watch import LineWatch
from rlmesh_ray.server.loop import in_thread
from rlmesh_ray.server.replies import arrives, take
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.lanes_v1 import LaneCall
from rlmesh_ray.wire.rlmesh_v1 import values

_LOG = logging.getLogger(__name__)

_ATTACH_TIMEOUT_MS = 2_000
_MOST_DIGITS = 20  # of a number that a line can have


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
        # The latest; it may have been cut.
        self._line: LentLine | None = None
        self._watch: LineWatch | None = None
        self._overdue: Failure | None = None
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
        is_idle = self._is_idle and (self._line is None or not self._line.control.is_busy)
        self._cut_line()
        self._pool.release(self._worker, is_idle=is_idle)

    # --- the line --------------------------------------------------------------------------

    async def lend_line(self, timeout_ms: int, *, tag_arrays: bool) -> LentLine | None:
        """Let the client ask the worker for steps directly; None: there is no idle worker.

        To be called between requests. Steps are executed over the line after ``track``.

        Args:
            timeout_ms: What the client's steps may take.
            tag_arrays: Whether it knows arrays in infos.
        """
        worker = self._worker
        if self._is_released or worker is None or self._finishing is not None:
            return None
        reply = await self._call(AttachCommand(tag_arrays), Deadline.after(_ATTACH_TIMEOUT_MS))
        if not isinstance(reply, AttachReply):
            return None
        begun = self._line.control.begun if self._line is not None else 0
        self._cut_line()
        try:
            line = worker.lend_line()
        except OSError as error:
            _LOG.warning("no shared memory for a session: %s", error)
            await in_thread(worker.kill)
            return None
        line.control.begin(begun, 0)
        line.control.end()
        self._line, self._overdue = line, None
        self._watch = LineWatch(line.control, timeout_ms, self._end_overdue)
        return line

    def track(self, episodes: tuple[Episode, ...]) -> None:
        """Have steps of ``episodes`` executed over the line; none: hand them all over."""
        if self._worker is not None and self._line is not None and not self._line.is_cut:
            self._worker.submit(TrackCommand(episodes))

    async def end_line(self) -> None:
        """Have the next requests come over the stream, after the step that is in progress."""
        is_there = self._line is not None and not self._line.is_cut
        if is_there and self._finishing is None and not self._is_released:
            await self._call(DetachCommand(), Deadline.after(0))
            self._cut_line()

    def _cut_line(self) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None  # it knows us: memory would wait for the collector of such circles
        if self._line is not None and not self._line.is_cut:
            self._line.cut()
            assert self._worker is not None, "a line has a worker"
            self._worker.take_line_back()

    def _end_overdue(self) -> bool:
        """Give up a step that has missed its deadline: its client hears of it on the stream."""
        line, worker = self._line, self._worker
        assert line is not None, "only a line is watched"
        assert worker is not None, "a line has a worker"
        if not self._is_idle:
            return False  # a request on the stream waits for the worker, with its own deadline
        timeout_ms = line.control.timeout_ms
        self._overdue = Failure(FailureKind.TIMEOUT, f"no result within {timeout_ms} ms")
        self._cut_line()
        self._is_idle = False
        worker.submit(DetachCommand())
        self._finishing = asyncio.ensure_future(self._finish(worker))
        return True

    async def _verdict(self, request: Step, deadline: Deadline) -> Failure | None:
        """Return what became of a step that has begun over the line; None: it has not."""
        number = request.request_id
        if self._line is None or not (number.isdecimal() and number.isascii()):
            return None
        if int(number[:_MOST_DIGITS]) > self._line.control.begun:
            return None
        if self._overdue is not None:
            return self._overdue
        return _as_failure(await self._call(VerdictCommand(), deadline))

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
                    self._cut_line()
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
        verdict = await self._verdict(request, deadline)
        if verdict is not None:
            return verdict
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
