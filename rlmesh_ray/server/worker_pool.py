"""The worker processes of an environment endpoint: one a session, started ahead of need."""

import asyncio

from rlmesh_ray.envs.commands import RenewCommand, RenewReply
from rlmesh_ray.envs.source import EnvSource
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CapacityError, EnvStartError
from rlmesh_ray.spaces.conformance import Policy
from rlmesh_ray.spaces.contract import EnvContract

_RENEW_TIMEOUT_S = 30.0
_CLOSE_TIMEOUT_S = 1.0


class WorkerPool:
    """Hands out workers, at most ``max_sessions`` at a time; keeps one spare.

    The first worker starts before the endpoint accepts anybody, and tells the contract.

    Args:
        source: What each worker runs.
        policy: How the workers validate values.
        max_sessions: How many may be out at once.
    """

    def __init__(self, source: EnvSource, policy: Policy, max_sessions: int) -> None:
        self._source = source
        self._policy = policy
        self._max_sessions = max_sessions
        self._num_sessions = 0
        self._out: set[WorkerProcess] = set()
        self._spare: WorkerProcess | None = None
        self._is_closed = False

    @property
    def num_sessions(self) -> int:
        """How many sessions hold a place."""
        return self._num_sessions

    def start(self) -> EnvContract:
        """Start the first worker; blocks until its environment exists.

        Raises:
            EnvStartError: The environment could not be created.
        """
        self._spare = WorkerProcess.start(self._source, policy=self._policy)
        return self._spare.contract

    async def acquire(self) -> WorkerProcess:
        """Return a worker for a new session.

        Raises:
            CapacityError: All sessions are taken.
            EnvStartError: A new worker's environment could not be created.
        """
        if self._num_sessions >= self._max_sessions:
            raise CapacityError(
                f"all {self._max_sessions} sessions are taken; close one, or serve the "
                "environment from a factory or id with a larger max_sessions"
            )
        self._num_sessions += 1
        try:
            return await self.replace(None)
        except BaseException:
            self._num_sessions -= 1
            raise

    async def replace(self, gone: WorkerProcess | None) -> WorkerProcess:
        """Return a fresh worker for a session; ``gone`` is the one that it has lost, if any.

        Raises:
            EnvStartError: The environment could not be created, or the endpoint is closing.
        """
        if gone is not None:
            self._out.discard(gone)
        worker, self._spare = self._spare, None
        if worker is None or not worker.is_alive:
            worker = await asyncio.to_thread(WorkerProcess.start, self._source, policy=self._policy)
        if self._is_closed:
            worker.kill()
            raise EnvStartError("the endpoint is closing")
        self._out.add(worker)
        return worker

    async def release(self, worker: WorkerProcess | None, *, is_reusable: bool) -> None:
        """End a session; its worker becomes the spare, renewed, if it is reusable."""
        is_fresh = (
            is_reusable and worker is not None and await asyncio.to_thread(self._renew, worker)
        )
        self._num_sessions -= 1
        if worker is None:
            return
        self._out.discard(worker)
        if is_fresh and self._spare is None and not self._is_closed:
            self._spare = worker
        else:
            await asyncio.to_thread(worker.close, _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """End all workers, also those of sessions that have not been released yet."""
        self._is_closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close(_CLOSE_TIMEOUT_S)
        for worker in tuple(self._out):
            worker.kill()

    def _renew(self, worker: WorkerProcess) -> bool:
        """Give ``worker`` a fresh environment; an instance cannot be made anew in place."""
        if not self._source.is_renewable:
            return False
        worker.submit(RenewCommand())
        return worker.poll(_RENEW_TIMEOUT_S) and isinstance(worker.receive(), RenewReply)
