"""The worker of one session, asked from the event loop: deadlines, crashes, replacement."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from rlmesh_ray.envs.commands import Command, Reply
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import EnvStartError
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.loop import in_thread
from rlmesh_ray.server.replies import arrives, take
from rlmesh_ray.server.worker_pool import WorkerPool

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


class SessionWorker:
    """Asks one worker at a time, and gets another when that is gone.

    Args:
        pool: Where workers come from; it has a place for the session.
        grace_s: How long a request may go on after its deadline, for nobody, before its worker
            is killed.
    """

    def __init__(self, pool: WorkerPool, grace_s: float) -> None:
        self._pool = pool
        self._grace_s = grace_s
        self.process: WorkerProcess | None = None
        """The latest; None: there has been none yet."""
        self.is_idle = True
        """Whether nobody waits for a reply, and nothing is done in vain."""
        # While the worker is busy with what nobody waits for any more.
        self._finishing: asyncio.Task[None] | None = None

    @property
    def is_finishing(self) -> bool:
        """Whether it is, or was when somebody looked last, busy with what missed its deadline."""
        return self._finishing is not None

    def require(self) -> WorkerProcess:
        """Return the process, of which is known that there is one."""
        assert self.process is not None, "the session lets no Step through before a Reset is done"
        return self.process

    async def call(self, command: Command, deadline: Deadline) -> Reply | Failure:
        """Have ``command`` done by an idle worker."""
        worker = self.require()
        if worker.fileno() < 0:
            return Failure(FailureKind.CRASHED, "the worker is gone; send Reset for a new one")
        self.is_idle = False
        worker.submit(command)
        if not await arrives(worker, deadline.at_s):
            self._finishing = asyncio.ensure_future(self._finish(worker))
            return Failure(FailureKind.TIMEOUT, f"no result within {deadline.timeout_ms} ms")
        reply = await take(worker)
        self.is_idle = True
        if isinstance(reply, Failure) and reply.kind is FailureKind.CRASHED:
            _LOG.warning("%s%s", reply.message, reply.debug_info and f"\n{reply.debug_info}")
        return reply

    def call_in_vain(self, command: Command) -> None:
        """Have ``command`` done after what the worker is busy with; nobody waits for either."""
        worker = self.require()
        self.is_idle = False
        worker.submit(command)
        self._finishing = asyncio.ensure_future(self._finish(worker))

    async def make_ready(
        self, deadline: Deadline, before_another: Callable[[], None]
    ) -> Failure | None:
        """Make sure that there is an idle worker; return what stands in the way.

        Args:
            deadline: Until when.
            before_another: Called before a worker is replaced.
        """
        message = ""
        try:
            async with asyncio.timeout_at(deadline.at_s):
                message = "still busy with an earlier request after"
                await self._finished()
                if self.process is None or not self.process.is_alive:
                    message = "the environment has not started within"
                    before_another()
                    self.process = await self._pool.replace(self.process)
        except TimeoutError:
            # It goes on finishing or starting; the next Reset finds it.
            return Failure(FailureKind.TIMEOUT, f"{message} {deadline.timeout_ms} ms")
        except EnvStartError as error:
            return Failure(FailureKind.CRASHED, str(error), error.traceback_text)
        return None

    async def make_idle(self, deadline: Deadline) -> Failure | None:
        """Wait for a worker that is still busy; return what stands in the way."""
        try:
            async with asyncio.timeout_at(deadline.at_s):
                await self._finished()
        except TimeoutError:
            message = f"still busy with an earlier request after {deadline.timeout_ms} ms"
            return Failure(FailureKind.TIMEOUT, message)
        return None

    def release(self, *, is_idle: bool) -> None:
        """Give the worker back; to be called once.

        Args:
            is_idle: Whether nobody else keeps it busy; if it is busy, it is killed.
        """
        if self._finishing is not None:
            self._finishing.cancel()
        self._pool.release(self.process, is_idle=self.is_idle and is_idle)

    async def _finished(self) -> None:
        """Wait until the worker is idle, or gone."""
        if self._finishing is not None:
            await asyncio.shield(self._finishing)
            self._finishing = None

    async def _finish(self, worker: WorkerProcess) -> None:
        """Let ``worker`` finish late, in vain; kill it when that takes too long.

        A busy environment cannot be asked to stop, and its result must never reach anyone.
        """
        if await arrives(worker, asyncio.get_running_loop().time() + self._grace_s):
            await take(worker)
        else:
            _LOG.warning("still busy %g s after a deadline: the worker is killed", self._grace_s)
            await in_thread(worker.kill)
        self.is_idle = True


def as_failure(reply: Any) -> Failure:
    """Return ``reply`` if it is a failure, and else that it is the wrong one."""
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")
