"""One session with an environment: a frame in, a frame out."""

import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from rlmesh_ray.protocol.env_session import EnvSession, SessionState
from rlmesh_ray.protocol.episodes import EpisodeStart
from rlmesh_ray.protocol.messages import EnvFailed, EnvTimings, Request, ResetDone
from rlmesh_ray.server.env_dialects import EnvServerDialect, EnvServerFrames
from rlmesh_ray.server.env_executor import EnvExecutor
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.server.worker_supervisor import WorkerSupervisor
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.transport.direct_handle import DirectHandle
from rlmesh_ray.wire.image_codec_v1 import SentImages


class RequestTimer:
    """Times the request in progress. As a context manager, it times the worker's part of it."""

    def __init__(self) -> None:
        self._arrived_ns = 0
        self._begun_ns = 0
        self._asked_ns: int | None = None
        self._replied_ns = 0

    def note_arrival(self) -> None:
        """Record that a request has been taken off the stream."""
        self._arrived_ns = time.perf_counter_ns()

    def begin(self) -> None:
        """Record that the request's turn has come."""
        self._begun_ns = time.perf_counter_ns()
        self._asked_ns = None

    def __enter__(self) -> None:
        """Record that the worker is asked; for one request that may be more than once."""
        if self._asked_ns is None:
            self._asked_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        """Record that the worker has replied."""
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


class EnvSessionHandler:
    """Answers the requests of one session, one at a time, in arrival order.

    Args:
        session: Order of its requests, and its episodes.
        executor: Executor of its environment.
        dialect: Dialect of the client.
        tag_arrays: Whether the client knows arrays in infos.
        timer: Times the requests, for a dialect with timings; None: they are not timed.
    """

    def __init__(
        self,
        session: EnvSession,
        executor: EnvExecutor,
        dialect: EnvServerDialect,
        *,
        tag_arrays: bool,
        timer: RequestTimer | None = None,
    ) -> None:
        self.executor = executor
        self.is_over = False
        """Whether the stream ends after the answer that was given last."""
        self._session = session
        self._frames: EnvServerFrames = dialect.frames
        ends_early = dialect.rules.ends_when_abandoned
        self._last_states = (
            (SessionState.CLOSED, SessionState.ABANDONED) if ends_early else (SessionState.CLOSED,)
        )
        self._tag_arrays = tag_arrays
        self._timer = timer
        self._with_timings = dialect.with_timings

    @property
    def episodes(self) -> tuple[EpisodeStart | None, ...]:
        """The latest episode of each lane; None: its record has been taken."""
        return self._session.episodes

    def accept(self, data: bytes) -> Callable[[float], Awaitable[bytes]]:
        """Take the request in ``data``, off the stream now; return the call that answers it.

        The call takes the seconds that the request has waited for its turn.
        """
        if self._timer is not None:
            self._timer.note_arrival()
        return partial(self.answer, data)

    def timeout_s(self, data: bytes) -> float:
        """Return the timeout of the request in ``data``; 0: none."""
        return getattr(self._frames.parse_request(data), "timeout_ms", 0) / 1000

    async def answer(self, data: bytes, waited_s: float = 0.0) -> bytes:
        """Return the answer to the request in ``data``, which has waited so long for its turn."""
        session, timer = self._session, self._timer
        if timer is not None:
            timer.begin()
        request = self._frames.parse_request(data)
        response = session.receive(request, time.time_ns())
        if response is None:
            pending = session.pending
            assert pending is not None, "the session wants it done"
            outcome = await self.executor.run(pending, session.autoreset_lanes, waited_s)
            response = session.complete(outcome, time.time_ns())
            if session.state is not SessionState.READY:
                self.executor.clear_episodes()
            elif isinstance(response, ResetDone):
                await self.executor.set_episodes(session.episodes)
        elif isinstance(response, EnvFailed) and isinstance(request, Request):
            self.executor.skip(request)
        if isinstance(response, EnvFailed):
            self.executor.note_error(response.code.name)
        self.is_over = session.state in self._last_states
        frame = self._frames.pack_response(response, tag_arrays=self._tag_arrays)
        if timer is None or self._with_timings is None:
            return frame
        return self._with_timings(frame, timer.timings())

    async def open_direct(
        self, timeout_ms: int, connection: socket.socket | None
    ) -> DirectHandle | None:
        """Open a direct connection, between two requests; see ``DirectSupervisor.open``."""
        if self._session.state is not SessionState.READY:
            return None
        direct = await self.executor.open_direct(
            timeout_ms, connection, tag_arrays=self._tag_arrays
        )
        if direct is not None:
            await self.executor.set_episodes(self._session.episodes)
        return None if direct is None or direct.is_disconnected else direct

    def interrupt(self) -> None:
        """Note that the stream has ended, in order or not."""
        self._session.interrupt(time.time_ns())


class EnvSessionFactory:
    """Opens the sessions of one endpoint.

    Args:
        pool: Provides the workers of the sessions; started.
        contract: Contract of the endpoint.
        step_grace_s: See ``EnvServer``.
    """

    def __init__(self, pool: WorkerPool, contract: EnvContract, step_grace_s: float) -> None:
        self._pool = pool
        self._contract = contract
        self._step_grace_s = step_grace_s

    @property
    def steps_subsets(self) -> bool:
        """Whether clients may reset and step any lanes alone, where their dialect knows that."""
        is_free = self._contract.autoreset_mode is AutoresetMode.DISABLED
        return is_free and self._pool.steps_subsets

    def open(
        self,
        dialect: EnvServerDialect,
        *,
        tag_arrays: bool,
        is_numbered: bool = False,
        images: SentImages | None = None,
    ) -> EnvSessionHandler:
        """Return a new session, whose place in the pool is reserved.

        Args:
            dialect: Dialect of its client.
            tag_arrays: Whether its client knows arrays in infos.
            is_numbered: See ``EnvExecutor``.
            images: See ``EnvExecutor``.
        """
        contract = self._contract
        timer = None if dialect.with_timings is None else RequestTimer()
        worker = WorkerSupervisor(self._pool, self._step_grace_s, contract.num_envs, timer)
        executor = EnvExecutor(worker, contract, dialect, is_numbered=is_numbered, images=images)
        session = EnvSession(
            contract.num_envs,
            _new_episode_id,
            worker.counting,
            dialect.rules,
            autoresets=contract.autoreset_mode is AutoresetMode.NEXT_STEP,
            steps_subsets=self.steps_subsets,
        )
        return EnvSessionHandler(session, executor, dialect, tag_arrays=tag_arrays, timer=timer)


def _new_episode_id() -> str:
    return uuid.uuid4().hex
