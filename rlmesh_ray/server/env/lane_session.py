"""One session with an environment: its requests, calls into its lanes, and observers' pictures.

They take turns: a call or a picture falls between two requests, never into a step. A request is a
frame in and a frame out: the session's rules judge it, its worker executes it, and bytes become
columns on the way, and back.

A session's ``EnvServerDialect`` has what generations differ in by encoding, and its rules what they
differ in by meaning. No code asks which generation it serves, except for the choice of the dialect
when a stream begins.
"""

import asyncio
import math
import socket
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

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
from rlmesh_ray.envs.vector_host import rows_of
from rlmesh_ray.envs.worker_process import DirectHandle, WorkerProcess
from rlmesh_ray.errors import CodecError
from rlmesh_ray.protocol import capabilities
from rlmesh_ray.protocol.capabilities import PROTOCOL_V1
from rlmesh_ray.protocol.env_session import (
    EDITION_2026_06_RULES,
    EnvOutcome,
    EnvRules,
    EnvSession,
    Failure,
    FailureKind,
    RenderOutcome,
    ResetOutcome,
    SessionState,
    StepOutcome,
)
from rlmesh_ray.protocol.messages import (
    EnvErrorCode,
    EnvFailed,
    EnvRequest,
    EnvResponse,
    EnvTimings,
    Infos,
    MalformedRequest,
    Render,
    Request,
    Reset,
    ResetDone,
    Step,
)
from rlmesh_ray.server.endpoint.handshake_service import GenerationHandshake
from rlmesh_ray.server.endpoint.log import current, short_name
from rlmesh_ray.server.env.session_worker import Deadline, SessionWorker, as_failure
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.server.observe.observer_service import PictureLimits
from rlmesh_ray.spaces.batch import Column
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import SpaceSpec
from rlmesh_ray.spaces.validation import warnings_as_texts
from rlmesh_ray.wire.image_codec_v1 import SentImages
from rlmesh_ray.wire.lane_calls_v1 import CallFailed, LaneCall
from rlmesh_ray.wire.observe_v1 import ObservedSession
from rlmesh_ray.wire.rlmesh_v1 import env as edition_frames
from rlmesh_ray.wire.rlmesh_v1 import values as edition_values
from rlmesh_ray.wire.rlmesh_v1.handshake import HandshakeFrames
from rlmesh_ray.wire.rlmesh_v1.values import BatchCodec

_MOST_DIGITS = 18  # of a number that a client counts to
_LONGEST_QUOTE = 80
T = TypeVar("T")
Lanes = tuple[int, ...]
"""Some of the lanes, in any order; empty: all of them, in theirs."""
CallOutcome = tuple[object, ...] | CallFailed | None
"""The results, or the error; None: the session has ended."""


class EnvServerFrames(Protocol):
    """A dialect's wire module for EnvService."""

    HANDSHAKE: HandshakeFrames

    def parse_request(self, data: bytes) -> EnvRequest | MalformedRequest:
        """Return the request in a frame; never raises."""

    def pack_response(self, response: EnvResponse, *, tag_arrays: bool) -> bytes:
        """Return the frame of a response; arrays in infos keep their dtype if they are tagged."""


@dataclass(frozen=True, slots=True)
class EnvServerDialect:
    """One generation's part in a session with an environment."""

    name: str
    """The generation's."""
    frames: EnvServerFrames
    codec: Callable[[SpaceSpec], BatchCodec]
    """Returns the codec of a space."""
    rules: EnvRules
    infos: Callable[[Infos, Sequence[int], int], Infos]
    """Converts the infos of a vector to the dialect's form, given the lanes that the response is
    about, and the width of the vector."""
    with_timings: Callable[[bytes, EnvTimings], bytes] | None = None
    """Adds the time that a request took to its response; None: the dialect has no such field."""
    handshake: GenerationHandshake | None = None
    """None for the edition's generation."""
    subset_capabilities: Mapping[str, str] = field(default_factory=dict)
    """Offered where single lanes can be stepped; those of the edition are EnvService's."""

    @property
    def handshake_frames(self) -> HandshakeFrames:
        return self.frames.HANDSHAKE


EDITION_DIALECT = EnvServerDialect(
    PROTOCOL_V1,
    edition_frames,
    edition_values.codec,
    EDITION_2026_06_RULES,
    lambda infos, _lanes, _num_lanes: warnings_as_texts(infos),
)


class RequestTimer:
    """Times the request in progress. As a context manager, it times the worker's part of it."""

    def __init__(self) -> None:
        self._arrived_ns = 0
        self._begun_ns = 0
        self._asked_ns: int | None = None
        self._replied_ns = 0

    def note_arrival(self) -> None:
        self._arrived_ns = time.perf_counter_ns()

    def begin(self) -> None:
        self._begun_ns = time.perf_counter_ns()
        self._asked_ns = None

    def __enter__(self) -> None:
        """Record that the worker is asked; for one request that may be more than once."""
        if self._asked_ns is None:
            self._asked_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        self._replied_ns = time.perf_counter_ns()

    def timings(self) -> EnvTimings:
        """Return the times of the request up to now; the parts add up to the total.

        Only one request is taken off a stream at a time: those behind it wait with gRPC, unseen.
        """
        now_ns = time.perf_counter_ns()
        total_ns = now_ns - self._arrived_ns
        queue_ns = self._begun_ns - self._arrived_ns
        if self._asked_ns is None:
            return EnvTimings(total_ns, decode_ns=now_ns - self._begun_ns, queue_ns=queue_ns)
        return EnvTimings(
            total_ns,
            decode_ns=self._asked_ns - self._begun_ns,
            user_ns=self._replied_ns - self._asked_ns,
            encode_ns=now_ns - self._replied_ns,
            queue_ns=queue_ns,
        )


class LaneSession:
    """One session with the lanes of an environment; in the serving loop.

    Args:
        pool: Provides its worker; the session has a place in it.
        contract: Contract of the endpoint.
        dialect: Dialect of the client.
        offered: Capabilities of the client.
        images: How images travel in observations, which are over all lanes then; None: unchanged.
        allowed_calls: Names that the client may call in its lanes; from ``checked_names``.
        session_id: A secret of the client; empty where its protocol has none.
        peer: gRPC's name of the client.
    """

    def __init__(
        self,
        pool: WorkerPool,
        contract: EnvContract,
        dialect: EnvServerDialect,
        offered: frozenset[str] = frozenset(),
        *,
        images: SentImages | None = None,
        allowed_calls: tuple[str, ...] = (),
        session_id: str = "",
        peer: str = "",
    ) -> None:
        self._timer = None if dialect.with_timings is None else RequestTimer()
        self.worker = SessionWorker(pool, contract.num_envs, self._timer)
        self.dialect = dialect
        self.session_id, self.peer = session_id, peer
        self.pictures = PictureLimits()
        self.is_over = False
        """Whether the stream ends after the answer that was given last."""
        self._since_ns = time.time_ns()
        self._session = EnvSession(
            contract.num_envs,
            lambda: uuid.uuid4().hex,
            self.worker.endpoint,
            dialect.rules,
            autoresets=contract.autoreset_mode is AutoresetMode.NEXT_STEP,
            steps_subsets=pool.steps_subsets,
        )
        self._contract = contract
        self._frames = dialect.frames
        self._action_codec = dialect.codec(contract.action_space)
        self._observation_codec = dialect.codec(contract.observation_space)
        self._tag_arrays = capabilities.NDARRAY in offered
        self._is_numbered = capabilities.NUMBERED_REQUESTS in offered
        self._images = images
        self._allowed_calls = allowed_calls
        self._all_lanes = tuple(range(contract.num_envs))
        self._turn = asyncio.Lock()
        self._num_answered = 0
        self._advanced = asyncio.Event()
        """Set whenever a request or a call has been answered."""
        self._num_calls = 0
        self.calls: set[asyncio.Task[Any]] = set()
        """Calls that are in progress, or wait for their turn."""
        self.observations: set[asyncio.Task[Any]] = set()
        """Pictures for observers that are being drawn, or wait for their turn."""
        self._current: asyncio.Task[Any] | None = None
        """The call or picture whose turn it is."""
        self._has_ended = self._is_opening = False
        self._last_look = (0, 0, False)
        """Requests and calls at the last look of the idle timeout; whether any was in progress."""

    # --- requests ---------------------------------------------------------------------------

    async def answer(self, data: bytes) -> bytes:
        if self._timer is not None:
            self._timer.note_arrival()
        waited_s, has_turn = 0.0, True
        if self._turn.locked():
            arrived_s = time.monotonic()
            timeout_ms = getattr(self._frames.parse_request(data), "timeout_ms", 0)
            try:
                async with asyncio.timeout(timeout_ms / 1000 or None):
                    await self._turn.acquire()
                waited_s = time.monotonic() - arrived_s
            except TimeoutError:
                waited_s, has_turn = math.inf, False
        else:
            await self._turn.acquire()
        try:
            return await self._answer(data, waited_s)
        finally:
            if has_turn:
                self._turn.release()
            self._num_answered += 1
            self._advanced.set()

    async def _answer(self, data: bytes, waited_s: float) -> bytes:
        """Answer a request that has waited so long; infinity: its deadline has passed."""
        session, timer = self._session, self._timer
        if timer is not None:
            timer.begin()
        request = self._frames.parse_request(data)
        response = session.receive(request, time.time_ns())
        if response is None:
            pending = session.pending
            assert pending is not None, "the session wants it done"
            outcome = await self._run(pending, waited_s)
            response = session.complete(outcome, time.time_ns())
            if session.state is not SessionState.READY:
                await self.worker.set_episodes(())
            elif isinstance(response, ResetDone):
                await self.worker.set_episodes(session.tracker.episodes)
        elif isinstance(response, EnvFailed) and isinstance(request, Request):
            self._skip(request)
        if isinstance(response, EnvFailed):
            self.worker.note_error(response.code.name)
        self.is_over = session.state is SessionState.CLOSED or (
            session.state is SessionState.ABANDONED and self.dialect.rules.ends_when_abandoned
        )
        frame = self._frames.pack_response(response, tag_arrays=self._tag_arrays)
        if timer is None or self.dialect.with_timings is None:
            return frame
        return self.dialect.with_timings(frame, timer.timings())

    async def _run(self, request: EnvRequest, waited_s: float) -> EnvOutcome:
        assert isinstance(request, Reset | Step | Render), "the session lets nothing else through"
        worker = self.worker
        number = self._number_of(request)
        deadline = Deadline(request.timeout_ms, waited_s)
        outcome: EnvOutcome
        if waited_s and deadline.has_passed:
            text = "not done: calls or observers used its environment for"
            outcome = worker.timed_out(text, request.timeout_ms)
        elif worker.overdue is not None and worker.endpoint.is_overdue(number):
            outcome = worker.overdue
        elif isinstance(request, Step):
            outcome = await self._step(request, deadline, number)
        elif isinstance(request, Reset):
            outcome = await self._reset(request, deadline, number)
        else:
            outcome = await self._render(request, deadline, number)
        if number and worker.endpoint.last_forwarded != number:
            worker.skip(number, has_failed=isinstance(outcome, Failure))
        if not worker.endpoint.is_at_rest:
            worker.disconnect()  # it may be sending an answer that is never read
        return outcome

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

    def _skip(self, request: Request | LaneCall) -> None:
        number = self._number_of(request)
        if number:
            self.worker.skip(number)

    async def _reset(self, request: Reset, deadline: Deadline, number: int) -> EnvOutcome:
        former = self.worker.process
        obstacle = await self.worker.make_ready(deadline)
        if obstacle is not None:
            return obstacle
        lanes = self._some(request.env_indices)
        process = self.worker.require()
        is_another, are_some = process is not former, 0 < len(lanes) < len(self._all_lanes)
        if is_another and are_some and self._session.state is SessionState.READY:
            # The other lanes are gone with the former worker, which the client does not know yet.
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        command = ResetCommand(request.seeds, dict(request.options) or None, lanes)
        reply = await self.worker.request(command, deadline, number)
        if not isinstance(reply, ResetReply):
            return as_failure(reply)
        shown = lanes if self.dialect.rules.narrows_replies else ()
        observation = await self._observation(process, reply.text_columns, shown)
        return ResetOutcome(observation, self._infos(reply.infos, shown))

    async def _step(self, request: Step, deadline: Deadline, number: int) -> EnvOutcome:
        worker = self.worker
        if not worker.endpoint.is_at_rest:
            obstacle = await worker.make_idle(deadline)
            if obstacle is not None:
                return obstacle
        lanes = self._some(request.env_indices) if request.env_indices else ()
        process = worker.process
        assert process is not None, "the session lets no Step through before a Reset is done"
        try:
            text_columns = self._write_action(process, request.action, lanes)
        except CodecError as error:
            return Failure(FailureKind.BAD_ACTION, str(error))
        command = StepCommand(text_columns, lanes, self._session.autoreset_lanes)
        reply = await worker.request(command, deadline, number)
        if not isinstance(reply, StepReply):
            return as_failure(reply)
        block = process.buffers.results
        rewards, terminated, truncated = block.rewards, block.terminated, block.truncated
        if lanes:
            rows = list(lanes)
            rewards, terminated, truncated = rewards[rows], terminated[rows], truncated[rows]
        return StepOutcome(
            observation=await self._observation(process, reply.text_columns, lanes),
            rewards=rewards.tolist(),
            terminated=terminated.tobytes(),
            truncated=truncated.tobytes(),
            infos=self._infos(reply.infos, lanes) if reply.infos else reply.infos,
            final_infos=reply.final_infos,
        )

    async def _render(self, request: Render, deadline: Deadline, number: int) -> EnvOutcome:
        worker = self.worker
        obstacle = await worker.make_idle(deadline)
        if obstacle is not None:
            return obstacle
        process = worker.process
        has_episodes = self._session.state is SessionState.READY
        # A worker that dies while it draws over the direct connection has episodes; they are lost.
        if process is None or not (process.is_alive or has_episodes):
            return RenderOutcome(None)
        command = RenderCommand(request.env_indices)
        reply = await worker.request(command, deadline, number)
        return RenderOutcome(reply.png) if isinstance(reply, RenderReply) else as_failure(reply)

    def _some(self, named: tuple[int, ...]) -> Lanes:
        return () if named == self._all_lanes else named

    def _write_action(
        self, process: WorkerProcess, action: bytes, lanes: Lanes
    ) -> tuple[tuple[str, ...], ...]:
        """Write the array columns to the step buffers; return the text columns."""
        num_rows = len(lanes) or self._contract.num_envs
        columns = self._action_codec.decode(action, num_rows)
        rows = list(lanes) if lanes else ...
        texts = []
        for target, column in zip(process.buffers.actions, columns, strict=True):
            if isinstance(column, tuple):
                texts.append(column)
            else:
                target[rows] = column  # type: ignore[index]  # array leaves have array columns
        return tuple(texts)

    async def _observation(
        self, process: WorkerProcess, text_columns: Sequence[tuple[str, ...]], lanes: Lanes
    ) -> bytes:
        texts = iter(text_columns)
        columns: list[Column] = [
            next(texts) if isinstance(column, tuple) else column
            for column in process.buffers.observations
        ]
        if lanes:
            columns = rows_of(columns, lanes)
        num_lanes, images = len(lanes) or self._contract.num_envs, self._images
        if images is None:
            return self._observation_codec.encode(columns, num_lanes)
        # Other sessions are served meanwhile; the worker writes nothing before the next request.
        return await asyncio.to_thread(
            lambda: images.values.encode(images.resized(columns), num_lanes)
        )

    def _infos(self, infos: Infos, lanes: Lanes) -> Infos:
        return self.dialect.infos(infos, lanes or self._all_lanes, len(self._all_lanes))

    # --- calls and pictures -----------------------------------------------------------------

    async def call(self, call: LaneCall) -> CallOutcome:
        objection = self._objection(call)
        if objection:
            self._skip(call)
            self._advanced.set()
            return CallFailed(EnvErrorCode.INVALID_ACTION, objection)
        self._num_calls += 1
        return await self._until_done(self._call_in_turn(call), self.calls)

    def _objection(self, call: LaneCall) -> str:
        """Return why a call is not allowed; empty: it is."""
        if call.name not in self._allowed_calls:
            return (
                f"{call.name[:_LONGEST_QUOTE]!r} may not be called; the operator of this endpoint "
                f"allows {', '.join(self._allowed_calls)} (allow_calls=…, --allow-call)"
            )
        lanes = call.lanes
        if len(lanes) > len(set(lanes)) or not set(lanes) <= set(self._all_lanes):
            shown = list(lanes[:_LONGEST_QUOTE])
            return f"lanes {shown} are not all different and in [0, {len(self._all_lanes)})"
        return ""

    async def observe(self, lane: int) -> RenderOutcome | Failure | None:
        """Render a lane for an observer when its turn has come; None: the session has ended."""
        return await self._until_done(self._observe_in_turn(lane), self.observations)

    async def _until_done(
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
            # that has begun continues.
            if task is not self._current:
                task.cancel()
            raise
        return None if task.cancelled() else task.result()

    async def _observe_in_turn(self, lane: int) -> RenderOutcome | Failure | None:
        async with self._turn:
            self._current = asyncio.current_task()
            try:
                return None if self._has_ended else await self._observe(lane)
            finally:
                self._current = None

    async def _observe(self, lane: int) -> RenderOutcome | Failure:
        # Without a deadline: one that passes would cost the client its episodes.
        if not self.worker.endpoint.is_at_rest:
            message = "its environment is still busy with a request that was too late; ask again"
            return Failure(FailureKind.TIMEOUT, message)
        if self._session.state is not SessionState.READY:
            message = "its client has not reset it, or has to do so again; ask after that"
            return Failure(FailureKind.BAD_REQUEST, message)
        reply = await self.worker.call_after_step(RenderCommand((lane,)), 0)
        if isinstance(reply, RenderReply):
            return RenderOutcome(reply.png, reply.took_s)
        return as_failure(reply)

    async def _call_in_turn(self, call: LaneCall) -> CallOutcome:
        deadline = Deadline(call.timeout_ms)
        try:
            async with asyncio.timeout_at(deadline.at_s):
                while not self._has_reached(call.num_requests):
                    self._advanced.clear()
                    await self._advanced.wait()
                await self._turn.acquire()
        except TimeoutError:
            self._skip(call)
            message = f"not called: still at the requests before it after {call.timeout_ms} ms"
            return CallFailed(EnvErrorCode.BUSY, message)
        self._current = asyncio.current_task()
        try:
            outcome = None if self._has_ended else await self._call(call, deadline)
        finally:
            self._current = None
            self._turn.release()
            self._advanced.set()
        if not isinstance(outcome, Failure):
            return outcome
        code = EDITION_2026_06_RULES.failures[outcome.kind].code
        return CallFailed(code, outcome.message, outcome.debug_info)

    def _has_reached(self, num_requests: int) -> bool:
        if self._is_numbered:
            return self.worker.endpoint.has_reached(num_requests)
        return self._num_answered >= num_requests

    async def _call(
        self, call: LaneCall, deadline: Deadline
    ) -> tuple[object, ...] | Failure | CallFailed:
        # Before the first Reset it gets a worker, as a Reset would. A worker that is gone is not
        # replaced: the client, which does not know yet, would step lanes that were not reset.
        worker = self.worker
        if worker.process is None:
            obstacle = await worker.make_ready(deadline)
            if obstacle is not None:
                self._skip(call)
                return obstacle
        obstacle = await worker.make_idle(deadline)
        if obstacle is not None:  # nothing has happened, and the episodes continue
            self._skip(call)
            return CallFailed(EnvErrorCode.BUSY, f"not called: {obstacle.message}")
        command = CallCommand(call.name, call.arguments, call.lanes)
        reply = await worker.request(command, deadline, self._number_of(call))
        if isinstance(reply, CallReply):
            return reply.results
        failed = as_failure(reply)
        if failed.kind in {FailureKind.TIMEOUT, FailureKind.CRASHED}:
            worker.disconnect()  # the next step waits on the stream, or is answered there
        return failed

    # --- what others see of it ----------------------------------------------------------------

    def was_active(self) -> bool:
        """Return whether the client has been active besides its stream since the last look."""
        before, is_at_work = self._last_look, self.worker.is_direct_busy or bool(self.calls)
        # Steps and calls that have ended since then count, too.
        self._last_look = (self.worker.progress.begun, self._num_calls, is_at_work)
        return is_at_work or self._last_look != before

    def report(self, name: str) -> ObservedSession:
        own, counts = self.worker.counts, self.worker.endpoint.copied_counts()
        done = own.read()
        episodes = zip(self._session.tracker.episodes, counts.is_tracked, strict=True)
        return ObservedSession(
            name,
            self.peer,
            self._since_ns,
            self.dialect.name,
            own.transport,
            tuple(each.episode_id if each and is_tracked else "" for each, is_tracked in episodes),
            tuple(counts.step_counts.tolist()),
            tuple(counts.cumulative_rewards.tolist()),
            done.num_steps,
            done.lane_steps,
            own.resets,
            done.episodes,
            done.deviations,
        )

    # --- the direct connection, and the end ---------------------------------------------------

    async def open_direct(
        self, timeout_ms: int, connection: socket.socket | None
    ) -> DirectHandle | None:
        """Open a direct connection, between two requests; see ``SessionWorker.open_direct``.

        None also while another one is being opened, since each takes descriptors, and where a
        client does not number requests: the numbers of its requests on the stream would not follow
        those of its direct steps.
        """
        if self._is_opening or not self._is_numbered:
            return None
        self._is_opening = True
        try:
            async with self._turn:
                if self._has_ended or self._session.state is not SessionState.READY:
                    return None
                direct = await self.worker.open_direct(
                    timeout_ms, connection, tag_arrays=self._tag_arrays
                )
                if self._has_ended:  # meanwhile
                    self.worker.disconnect()
                    return None
                if direct is not None:
                    await self.worker.set_episodes(self._session.tracker.episodes)
                return None if direct is None or direct.is_disconnected else direct
        finally:
            self._is_opening = False

    async def close_direct(self) -> None:
        async with self._turn:
            if not self._has_ended:
                await self.worker.close_direct()

    def end(self) -> None:
        """End its calls and pictures, and give the worker back. Idempotent.

        A worker that is still busy is killed, not waited for. A separate task does that, which the
        cancellation of a stream cannot interrupt.
        """
        if self._has_ended:
            return
        self._has_ended = True
        self._session.interrupt(time.time_ns())
        for task in (*self.calls, *self.observations):
            task.cancel()
        self.worker.release()


class Sessions:
    """The open sessions of an endpoint: for calls, direct connections and observers."""

    def __init__(self) -> None:
        self.by_name: dict[str, LaneSession] = {}
        """By their names in the log."""
        self.by_id: dict[str, LaneSession] = {}
        """By their ids, which only their clients know."""

    def add(self, session: LaneSession) -> None:
        """Let others than the client of ``session`` find it; in the log context of its stream."""
        _, name = current()
        while not name or name in self.by_name:  # names are short, and may be equal
            name = short_name("")
        self.by_name[name] = session
        if session.session_id:
            # A second stream with the same id is a replay, and only the first one is found by it.
            self.by_id.setdefault(session.session_id, session)

    def end(self, session: LaneSession) -> None:
        self.by_name = {name: each for name, each in self.by_name.items() if each is not session}
        self.by_id = {name: each for name, each in self.by_id.items() if each is not session}
        session.end()
