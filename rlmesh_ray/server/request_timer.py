"""What the requests of a session take, for clients that are told."""

import time
from collections.abc import AsyncIterator, Callable

from rlmesh_ray.envs.commands import Command, Reply
from rlmesh_ray.protocol.messages import EnvTimings
from rlmesh_ray.protocol.outcomes import Failure
from rlmesh_ray.server.session_worker import Deadline, SessionWorker
from rlmesh_ray.server.worker_pool import WorkerPool


class RequestTimer:
    """Looks at the clock when something happens to the request in progress."""

    def __init__(self) -> None:
        self._arrived_ns = 0
        self._begun_ns = 0
        self._asked_ns: int | None = None
        self._told_ns = 0

    def note_arrival(self) -> None:
        """A request has been taken off the stream."""
        self._arrived_ns = time.perf_counter_ns()

    def begin(self) -> None:
        """Its turn has come."""
        self._begun_ns = time.perf_counter_ns()
        self._asked_ns = None

    def note_worker_request(self) -> None:
        """The worker is turned to; for one request that may be more than once."""
        if self._asked_ns is None:
            self._asked_ns = time.perf_counter_ns()

    def note_worker_reply(self) -> None:
        """The worker has answered."""
        self._told_ns = time.perf_counter_ns()

    def timings(self) -> EnvTimings:
        """Return what the request has taken up to now; the parts make up the whole.

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
            user_ns=self._told_ns - self._asked_ns,
            encode_ns=now_ns - self._told_ns,
            queue_ns=queue_ns,
        )


class TimedFrames:
    """The messages of a stream; a stopwatch sees each of them arrive.

    Args:
        frames: The stream.
        watch: The session's.
    """

    def __init__(self, frames: AsyncIterator[bytes], watch: RequestTimer) -> None:
        self._frames = aiter(frames)
        self._watch = watch

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        frame = await anext(self._frames)
        self._watch.note_arrival()
        return frame


class TimedSessionWorker(SessionWorker):
    """Tells a stopwatch when it is asked and when it has answered.

    Args:
        pool: See ``SessionWorker``.
        grace_s: See ``SessionWorker``.
        num_lanes: See ``SessionWorker``.
        watch: The session's.
    """

    def __init__(
        self, pool: WorkerPool, grace_s: float, num_lanes: int, watch: RequestTimer
    ) -> None:
        super().__init__(pool, grace_s, num_lanes)
        self._watch = watch

    async def call(self, command: Command, deadline: Deadline, number: int = 0) -> Reply | Failure:
        """See ``SessionWorker``."""
        self._watch.note_worker_request()
        reply = await super().call(command, deadline, number)
        self._watch.note_worker_reply()
        return reply

    async def make_ready(
        self, deadline: Deadline, before_another: Callable[[], None]
    ) -> Failure | None:
        """See ``SessionWorker``."""
        self._watch.note_worker_request()
        obstacle = await super().make_ready(deadline, before_another)
        self._watch.note_worker_reply()
        return obstacle

    async def make_idle(self, deadline: Deadline) -> Failure | None:
        """See ``SessionWorker``."""
        self._watch.note_worker_request()
        obstacle = await super().make_idle(deadline)
        self._watch.note_worker_reply()
        return obstacle
