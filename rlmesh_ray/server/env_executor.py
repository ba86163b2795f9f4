"""Executes the requests of one session in its environment: bytes to columns, and back."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace

from rlmesh_ray.envs.commands import (
    CallCommand,
    CallReply,
    RenderCommand,
    RenderReply,
    ResetCommand,
    ResetReply,
    StepCommand,
    StepReply,
)
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol.env_session import EnvOutcome, RenderOutcome, ResetOutcome, StepOutcome
from rlmesh_ray.protocol.episodes import EpisodeStart
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.protocol.messages import (
    EnvErrorCode,
    EnvRequest,
    Infos,
    Render,
    Request,
    Reset,
    Step,
)
from rlmesh_ray.server.counters import LaneCounters
from rlmesh_ray.server.direct_supervisor import DirectSupervisor
from rlmesh_ray.server.env_dialects import EnvServerDialect
from rlmesh_ray.server.request_deadline import Deadline
from rlmesh_ray.server.worker_supervisor import WorkerSupervisor, as_failure
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.transport.direct_handle import DirectHandle
from rlmesh_ray.transport.session_progress import EpisodeCounts
from rlmesh_ray.wire.image_codec_v1 import SentImages
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall

_MOST_DIGITS = 18  # of a number that a client counts to
Lanes = tuple[int, ...]
"""Some of the lanes, in any order; empty: all of them, in theirs."""


class EnvExecutor:
    """The environment of one session, from the first Reset on.

    Args:
        worker: Worker of the session.
        contract: Contract of the endpoint.
        dialect: Dialect of the client.
        is_numbered: Whether the client numbers its requests (``capabilities.NUMBERED_REQUESTS``).
        images: How images travel in observations, which are over all lanes then; None: as they are.
    """

    def __init__(
        self,
        worker: WorkerSupervisor,
        contract: EnvContract,
        dialect: EnvServerDialect,
        *,
        is_numbered: bool = False,
        images: SentImages | None = None,
    ) -> None:
        self._contract = contract
        self._dialect = dialect
        self._all_lanes = tuple(range(contract.num_envs))
        self._worker = worker
        self._direct = DirectSupervisor(self._worker)
        self._is_numbered = is_numbered
        self._images = images
        self._is_running = False
        self._is_released = False

    async def run(
        self, request: EnvRequest, autoreset_lanes: Lanes = (), waited_s: float = 0.0
    ) -> EnvOutcome:
        """Execute a legal ``request``; errors are returned as a Failure.

        Args:
            request: A reset, a step or a render.
            autoreset_lanes: Lanes in which an autoreset begins an episode with it, a step.
            waited_s: How long it has waited for its turn, which counts.
        """
        self._worker.settle_numbers()
        number = self._number_of(request)
        assert isinstance(request, (Reset, Step, Render)), "the session lets nothing else through"
        deadline = Deadline.after(request.timeout_ms, waited_s)
        if deadline.has_passed:
            text = "not done: calls or observers used its environment for"
            outcome: EnvOutcome = self._worker.timed_out(text, request.timeout_ms)
        else:
            outcome = await self._run(request, deadline, number, autoreset_lanes)
        if number and self._worker.endpoint.last_forwarded != number:
            self._worker.skip(number, has_failed=isinstance(outcome, Failure))
        if not self._worker.endpoint.is_at_rest:
            self._direct.disconnect()  # the worker may be sending an answer that is never read
        if self._images is not None and isinstance(outcome, ResetOutcome | StepOutcome):
            data = await asyncio.to_thread(self._sent, self._images, outcome.observation)
            outcome = replace(outcome, observation=data)
        return outcome

    async def _run(
        self,
        request: Reset | Step | Render,
        deadline: Deadline,
        number: int,
        autoreset_lanes: Lanes,
    ) -> EnvOutcome:
        match request:
            case Reset():
                return await self._reset(request, deadline, number)
            case Step():
                return await self._step(request, deadline, number, autoreset_lanes)
            case Render():
                return await self._render(request, deadline, number)

    def skip(self, request: Request | LaneCall) -> None:
        """Skip the number of a request that was answered without the worker."""
        number = self._number_of(request)
        if number:
            self._worker.skip(number)

    def has_reached(self, number: int) -> bool:
        """Return whether all requests up to a number have been executed or skipped.

        Args:
            number: From a client which numbers its requests.
        """
        return self._worker.endpoint.has_reached(number)

    @property
    def is_numbered(self) -> bool:
        """Whether the client numbers its requests."""
        return self._is_numbered

    def _number_of(self, request: Request | LaneCall) -> int:
        """Return the client's number for ``request``; 0: it has none."""
        if not self._is_numbered:
            return 0
        if isinstance(request, LaneCall):
            number = request.num_requests + 1
            return number if number < 10**_MOST_DIGITS else 0
        request_id = request.request_id
        is_number = request_id.isdecimal() and request_id.isascii()
        return int(request_id) if is_number and len(request_id) <= _MOST_DIGITS else 0

    @property
    def num_direct_steps(self) -> int:
        """Number of the last request that the worker has begun, over any transport."""
        return self._direct.num_begun

    @property
    def is_direct_step_running(self) -> bool:
        """Whether a step is in progress over the direct connection."""
        return self._direct.is_busy

    @property
    def num_steps(self) -> int:
        """Vector steps up to now, over all transports."""
        return self._worker.counts.num_steps

    @property
    def counts(self) -> LaneCounters:
        """Counters of the lanes, over all transports."""
        return self._worker.counts

    @property
    def episode_counts(self) -> EpisodeCounts:
        """Counters of the lanes' episodes, after the last request that has succeeded."""
        return self._worker.counting.copy()

    def note_error(self, code: str) -> None:
        """Count an error that a request was answered with."""
        self._worker.note_error(code)

    async def call(
        self, call: LaneCall, deadline: Deadline
    ) -> tuple[object, ...] | Failure | CallFailed:
        """Call into the environment; to be called between requests.

        Before the first Reset it gets a worker, as a Reset would. A worker that is gone is not
        replaced: the client, which does not know yet, would step lanes that were not reset.
        """
        if self._worker.process is None:
            obstacle = await self._make_ready(deadline)
            if obstacle is not None:
                self.skip(call)
                return obstacle
        obstacle = await self._worker.make_idle(deadline)
        if obstacle is not None:  # nothing has happened, and the episodes go on
            self.skip(call)
            return CallFailed(EnvErrorCode.BUSY, f"not called: {obstacle.message}")
        self._worker.settle_numbers()
        command = CallCommand(call.name, call.arguments, call.lanes)
        reply = await self._worker.request(command, deadline, self._number_of(call))
        if isinstance(reply, CallReply):
            return reply.results
        failed = as_failure(reply)
        if failed.kind in {FailureKind.TIMEOUT, FailureKind.CRASHED}:
            self._direct.disconnect()  # the next step waits on the stream, or is answered there
        return failed

    async def observe(self, lane: int) -> RenderOutcome | Failure:
        """Render a lane for an observer; to be called between requests.

        It has no deadline: one that passes would cost the client its episodes.
        """
        if not self._worker.endpoint.is_at_rest:
            message = "its environment is still busy with a request that was too late; ask again"
            return Failure(FailureKind.TIMEOUT, message)
        if self._is_released or not self._is_running:
            message = "its client has not reset it, or has to do so again; ask after that"
            return Failure(FailureKind.BAD_REQUEST, message)
        reply = await self._direct.call_after_step(RenderCommand((lane,)), 0)
        if isinstance(reply, RenderReply):
            return RenderOutcome(reply.png, reply.took_s)
        return as_failure(reply)

    def release(self) -> None:
        """Give the worker back; one that is still busy is killed, not waited for.

        Idempotent. The rest goes on by itself, so that the cancellation of a stream cannot
        interrupt it.
        """
        if self._is_released:
            return
        self._is_released = True
        is_idle = not self._worker.progress.is_busy  # also on a direct connection that has ended
        self._direct.disconnect()
        self._worker.release(is_idle=is_idle)

    async def open_direct(
        self, timeout_ms: int, connection: socket.socket | None, *, tag_arrays: bool
    ) -> DirectHandle | None:
        """See ``DirectSupervisor.open``; None also where a client does not number requests.

        The numbers of its requests on the stream would not follow those of its direct steps.
        """
        if self._is_released or not self._is_numbered:
            return None
        direct = await self._direct.open(timeout_ms, connection, tag_arrays=tag_arrays)
        if self._is_released:  # meanwhile
            self._direct.disconnect()
            return None
        return direct

    async def set_episodes(self, episodes: tuple[EpisodeStart | None, ...]) -> None:
        """Set the latest episode of each lane; see ``DirectSupervisor.set_episodes``."""
        self._is_running = True
        await self._direct.set_episodes(episodes)

    def clear_episodes(self) -> None:
        """Note that no episode runs any more; see ``DirectSupervisor.clear_episodes``."""
        self._is_running = False
        self._direct.clear_episodes()

    async def close_direct(self) -> None:
        """See ``DirectSupervisor.close``."""
        if not self._is_released:
            await self._direct.close()

    async def _make_ready(self, deadline: Deadline) -> Failure | None:
        return await self._worker.make_ready(deadline, self._direct.disconnect)

    async def _reset(self, request: Reset, deadline: Deadline, number: int) -> EnvOutcome:
        former = self._worker.process
        obstacle = await self._make_ready(deadline)
        if obstacle is not None:
            return obstacle
        lanes = self._some(request.env_indices)
        is_another = self._worker.process is not former
        if is_another and self._is_running and 0 < len(lanes) < len(self._all_lanes):
            # The other lanes are gone with the former worker, which the client does not know yet.
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        command = ResetCommand(
            seeds=request.seeds, options=dict(request.options) or None, lanes=lanes
        )
        reply = await self._worker.request(command, deadline, number)
        if not isinstance(reply, ResetReply):
            return as_failure(reply)
        shown = lanes if self._dialect.rules.narrows_replies else ()
        return ResetOutcome(
            self._observation(reply.text_columns, shown), self._infos(reply.infos, shown)
        )

    async def _step(
        self, request: Step, deadline: Deadline, number: int, autoreset_lanes: Lanes
    ) -> EnvOutcome:
        if self._worker.endpoint.is_overdue(number):
            return self._direct.overdue
        if not self._worker.endpoint.is_at_rest:
            obstacle = await self._worker.make_idle(deadline)
            if obstacle is not None:
                return obstacle
        lanes = self._some(request.env_indices) if request.env_indices else ()
        try:
            worker = self._worker.require()
            text_columns = self._write_action(worker, request.action, lanes)
        except CodecError as error:
            return Failure(FailureKind.BAD_ACTION, str(error))
        command = StepCommand(text_columns, lanes, autoreset_lanes)
        reply = await self._worker.request(command, deadline, number)
        if not isinstance(reply, StepReply):
            return as_failure(reply)
        block = worker.results
        rewards, terminated, truncated = block.rewards, block.terminated, block.truncated
        if lanes:
            rows = list(lanes)
            rewards, terminated, truncated = rewards[rows], terminated[rows], truncated[rows]
        return StepOutcome(
            observation=self._observation(reply.text_columns, lanes),
            rewards=rewards.tolist(),
            terminated=terminated.tobytes(),
            truncated=truncated.tobytes(),
            infos=self._infos(reply.infos, lanes) if reply.infos else reply.infos,
            final_infos=reply.final_infos,
        )

    async def _render(self, request: Render, deadline: Deadline, number: int) -> EnvOutcome:
        if self._worker.endpoint.is_overdue(number):
            return self._direct.overdue
        obstacle = await self._worker.make_idle(deadline)
        if obstacle is not None:
            return obstacle
        process = self._worker.process
        # A worker that dies while it draws over the direct connection has episodes; they are lost.
        if process is None or not (process.is_alive or self._is_running):
            return RenderOutcome(None)
        command = RenderCommand(request.env_indices)
        reply = await self._worker.request(command, deadline, number)
        return RenderOutcome(reply.png) if isinstance(reply, RenderReply) else as_failure(reply)

    def _some(self, named: tuple[int, ...]) -> Lanes:
        return () if named == self._all_lanes else named

    def _write_action(
        self, worker: WorkerProcess, action: bytes, lanes: Lanes
    ) -> tuple[tuple[str, ...], ...]:
        """Write the array columns to the buffers of ``worker``; return the text columns."""
        num_rows = len(lanes) or self._contract.num_envs
        columns = self._dialect.values.decode_batch(self._contract.action_space, action, num_rows)
        rows = list(lanes) if lanes else ...
        texts = []
        for target, column in zip(worker.action_columns, columns, strict=True):
            if isinstance(column, tuple):
                texts.append(column)
            else:
                target[rows] = column  # type: ignore[index]  # array leaves have array columns
        return tuple(texts)

    def _observation(self, text_columns: Sequence[tuple[str, ...]], lanes: Lanes) -> bytes:
        texts = iter(text_columns)
        columns: list[Column] = [
            next(texts) if isinstance(column, tuple) else column
            for column in self._worker.require().observation_columns
        ]
        if lanes:
            columns = [_rows(column, lanes) for column in columns]
        return self._dialect.values.encode_batch(
            self._contract.observation_space, columns, len(lanes) or self._contract.num_envs
        )

    def _sent(self, images: SentImages, observation: bytes) -> bytes:
        space, num_lanes = self._contract.observation_space, self._contract.num_envs
        columns = self._dialect.values.decode_batch(space, observation, num_lanes)
        return images.values.encode(images.resized(columns), num_lanes)

    def _infos(self, infos: Infos, lanes: Lanes) -> Infos:
        return self._dialect.infos(infos, lanes or self._all_lanes, len(self._all_lanes))


def _rows(column: Column, lanes: Lanes) -> Column:
    if isinstance(column, tuple):
        return tuple(column[lane] for lane in lanes)
    return column[list(lanes)]
