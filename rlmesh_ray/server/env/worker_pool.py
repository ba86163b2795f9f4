"""The workers of an environment endpoint: one per session, started ahead of need."""

import asyncio

from rlmesh_ray.envs.env_source import EnvSource
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CapacityError, EnvStartError
from rlmesh_ray.server.endpoint.event_loop import in_thread
from rlmesh_ray.server.endpoint.gate import RAISE_LIMITS, require_descriptors
from rlmesh_ray.server.env.env_options import DEFAULT_STEP_GRACE_S
from rlmesh_ray.server.observe.counters import EnvCounters, FailureLog
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.validation import ValidationMode

_CLOSE_TIMEOUT_S = 1.0
_LEAVE_TIMEOUT_S = 5.0  # environments write videos when a session ends, and have time for it
_PLACE_TIMEOUT_S = _LEAVE_TIMEOUT_S + 2.0  # a leaving worker is gone by then, or killed

_WORKER_DESCRIPTORS = 8
"""Of a worker with a direct connection over TCP; shared memory, which takes one more, can wait."""
_IS_CLOSING = "the endpoint is closing"


class WorkerPool:
    """Hands out workers, at most ``max_sessions`` at a time; keeps one spare.

    The first worker starts before the endpoint accepts clients, and provides the contract. All
    methods but ``start`` must be called from the serving loop. ``sessions_per_worker`` is how many
    sessions' workers share a process; ``step_grace_s``, how long a late request may continue before
    its worker is killed.
    """

    def __init__(
        self,
        source: EnvSource,
        validation: ValidationMode,
        max_sessions: int,
        sessions_per_worker: int = 1,
        step_grace_s: float = DEFAULT_STEP_GRACE_S,
    ) -> None:
        self._source = source
        self._sessions_per_worker = sessions_per_worker
        self.step_grace_s = step_grace_s
        self._validation = validation
        self._out: set[WorkerProcess] = set()
        # Processes whose start is not complete; they end with the pool.
        self._starting: set[WorkerProcess] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._ending: set[WorkerProcess] = set()
        # Starts without a caller: of a spare, or of a session that has left meanwhile. The next
        # session takes one over.
        self._orphans: set[asyncio.Future[WorkerProcess]] = set()
        self._spare: WorkerProcess | None = None
        self._is_closed = False
        self._kind: tuple[object, ...] = ()
        self.counts = EnvCounters()
        self._max_sessions = max_sessions
        self.num_sessions = 0
        """Open sessions, with and without a worker."""
        self.failures = FailureLog()
        self.steps_subsets = False
        """Whether a client may reset and step any lanes alone; only after ``start``."""

    def start(self) -> EnvContract:
        """Start the first worker; blocks until its environment exists.

        Raises:
            EnvStartError: The environment could not be created.
        """
        self._spare = WorkerProcess.start(self._source, validation=self._validation)
        contract = self._spare.contract
        # Lanes that reset themselves may only be stepped together.
        is_disabled = contract.autoreset_mode is AutoresetMode.DISABLED
        self.steps_subsets = is_disabled and self._spare.steps_subsets
        self._kind = _kind_of(contract)
        return contract

    async def reserve(self) -> None:
        """Reserve a place for a session, without a worker; ``release`` gives it back.

        It waits for a session that is just ending, as long as that can take.

        Raises:
            CapacityError: All sessions are taken, or the process has too few file descriptors.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _PLACE_TIMEOUT_S
        while self.num_sessions >= self._max_sessions and self._leaving:
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            await asyncio.wait(self._leaving, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        try:
            if self.num_sessions >= self._max_sessions:
                raise CapacityError(
                    f"all {self._max_sessions} sessions are taken; close one, or serve the "
                    "environment from a factory or id with a larger max_sessions"
                )
            num_to_start = self.num_sessions + 1 - len(self._out) - (self._spare is not None)
            require_descriptors(max(0, num_to_start) * _WORKER_DESCRIPTORS)
        except CapacityError:
            self.counts.sessions.refused += 1
            raise
        self.num_sessions += 1

    async def take(self, lost: WorkerProcess | None = None) -> WorkerProcess:
        """Return a fresh worker for a session that has a place; kill the one that it has lost.

        When the caller is cancelled, a start continues and serves the next session.

        Raises:
            CapacityError: The endpoint's machine lets it start no process.
            EnvStartError: The environment could not be created, or the endpoint is closing.
        """
        # A caller that was cancelled comes again with a worker that is no longer in use.
        if lost is not None and lost in self._out:
            self.counts.worker_restarts += 1
            self._out.discard(lost)
            await in_thread(lost.kill)
        worker, self._spare = self._spare, None
        if worker is None or not worker.is_alive:
            worker = await self._start_another()
        if self._is_closed:
            await in_thread(worker.kill)
            raise EnvStartError(_IS_CLOSING)
        self._out.add(worker)
        self._starting.discard(worker)
        return worker

    def release(self, worker: WorkerProcess | None, *, is_idle: bool) -> None:
        """End a session and its worker; a spare starts in its place.

        The place is free when the worker's environment is closed, or killed because that takes
        too long; ``reserve`` waits for it. The start of the spare holds no place. A worker that is
        not idle, since it has not replied to every command, is killed immediately.
        """
        if worker is None:
            self.num_sessions -= 1
            return
        self._ending.add(worker)
        leaving = asyncio.ensure_future(self._retire(worker, is_idle))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        self._is_closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            await in_thread(spare.close, _CLOSE_TIMEOUT_S)
        if self._leaving:
            # A recorded session hands over what has been noted.
            is_recorded = self._source.observer is not None
            timeout_s = _LEAVE_TIMEOUT_S if is_recorded else _CLOSE_TIMEOUT_S
            await asyncio.wait(self._leaving, timeout=timeout_s)
        await asyncio.gather(
            *(in_thread(worker.kill) for worker in self._out),
            *(in_thread(worker.kill) for worker in tuple(self._starting)),  # threads add some
        )

    async def _start_another(self) -> WorkerProcess:
        starting = self._orphans.pop() if self._orphans else in_thread(self._start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._leave(starting)
            raise
        except OSError as error:
            raise CapacityError(
                f"the endpoint cannot start a process for another session ({error}): {RAISE_LIMITS}"
            ) from error

    def _start(self, place: WorkerProcess | None = None) -> WorkerProcess:
        """Start a worker that ``close`` can end, in ``place``, if there is one; in a thread."""
        if process := place or self._joined_process():
            try:
                return self._start_in(process)
            except EnvStartError:
                if not process.is_over:
                    raise
                # Another session's environment may have ended it.
        return self._start_in(WorkerProcess.new())

    def _start_in(self, process: WorkerProcess) -> WorkerProcess:
        self._starting.add(process)
        if self._is_closed:  # after it was added: close has seen it, or is seen here
            process.kill()
            raise EnvStartError(_IS_CLOSING)
        try:
            worker = WorkerProcess.start(self._source, validation=self._validation, process=process)
            if _kind_of(worker.contract) != self._kind:
                worker.kill(spares_others=True)
                raise EnvStartError(
                    f"{self._source.description} has another contract than before; a factory must "
                    "create the same environment every time"
                )
            return worker
        except BaseException:
            self._starting.discard(process)
            raise

    def _joined_process(self) -> WorkerProcess | None:
        """Return a place in a process that has room for another worker; None: no process has."""
        if self._sessions_per_worker == 1:
            return None
        workers, ending = [*self._out, self._spare], [*self._ending]  # copies: this is a thread
        joined = (
            worker.join(self._sessions_per_worker)
            for worker in workers
            # An environment that hangs while it closes would hold up the next one.
            if worker and not any(worker.shares_process(each) for each in ending)
        )
        return next(filter(None, joined), None)

    def _leave(self, starting: "asyncio.Future[WorkerProcess]") -> None:
        self._orphans.add(starting)
        starting.add_done_callback(self._adopt)

    def _adopt(self, started: "asyncio.Future[WorkerProcess]") -> None:
        if started not in self._orphans:
            return  # another session has taken it over
        self._orphans.remove(started)
        if started.cancelled() or started.exception() is not None:
            return
        if self._spare is None and not self._is_closed:
            self._spare = started.result()
            self._starting.discard(self._spare)
        else:
            in_thread(started.result().kill, spares_others=True)

    async def _retire(self, worker: WorkerProcess, is_idle: bool) -> None:
        place = None
        # Then the spare needs no other process, which takes a second to start.
        if is_idle and self._needs_spare():
            place = await in_thread(worker.join, self._sessions_per_worker + 1)
        try:
            if is_idle:
                await in_thread(worker.close, _LEAVE_TIMEOUT_S)
            else:
                await in_thread(worker.kill, spares_others=True)
            # Simulators that the environment has not ended end with the process, and so do threads
            # that hang. In a process of several sessions they may be another session's.
            is_alone = self._sessions_per_worker == 1
            if place is not None and (
                place.is_stuck or (is_alone and await in_thread(worker.has_children))
            ):
                await in_thread(place.end, 0.0, spares_others=True)
                place = None
        finally:
            self._out.discard(worker)
            self._ending.discard(worker)
            # The session that waits for this place takes the spare that starts below, so nothing
            # is awaited in between.
            self.num_sessions -= 1
        if self._needs_spare():  # not before: two environments at a time may want the same device
            self._leave(in_thread(self._start, place))
        elif place is not None:
            await in_thread(place.end, _CLOSE_TIMEOUT_S, spares_others=True)

    def _needs_spare(self) -> bool:
        # An instance that was handed in cannot be made anew.
        is_wanted = self._spare is None and not self._orphans and not self._is_closed
        return is_wanted and self._source.can_recreate


def _kind_of(contract: EnvContract) -> tuple[object, ...]:
    """Return the parts of a contract that must be equal in all workers.

    Not the metadata: they may hold arrays, whose comparison is not a bool.
    """
    spaces = contract.observation_space, contract.action_space
    return *spaces, contract.num_envs, contract.autoreset_mode
