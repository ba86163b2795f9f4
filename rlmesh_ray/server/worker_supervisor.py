"""The worker of one session, used from the event loop: its late answers, crashes and restarts."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlmesh_ray.envs.commands import Command, Reply, ResetReply, SkipRequestCommand
from rlmesh_ray.envs.worker_process import WorkerProcess
from rlmesh_ray.errors import CapacityError, EnvStartError
from rlmesh_ray.polling import AdaptiveSpin
from rlmesh_ray.protocol.failure_effects import NOT_STARTED, Failure, FailureKind
from rlmesh_ray.server.log_context import current, facts, logged_as
from rlmesh_ray.server.request_deadline import (
    Deadline,
    LateCommand,
    take_reply,
    wait_for_reply,
)
from rlmesh_ray.server.worker_pool import WorkerPool
from rlmesh_ray.transport.exactly_once import EndpointSide
from rlmesh_ray.transport.session_progress import EpisodeCounts, SessionProgress

_LOG = logging.getLogger(__name__)

_LONGEST_SPIN_S = 1e-3
"""How long the loop may spin for a worker while there is only one session."""

_SENDING_PAUSE_S = 1e-3
_LONGEST_SENDING_S = 1.0
"""How long an idle worker may take to read a command: the answer to a request waits for that."""

_OBSERVER_GRACE_S = 60.0
"""How long a picture for an observer may take after a step that was late."""

_SLOW_RESET_S, _LONGEST_REPORT_PAUSE_S = 3.0, 60.0
"""After how long resets in progress are logged, and the longest pause until they are again."""

_LOOK_EVERY_S = 0.25
"""How often resets in progress are looked at: the worker has begun them a moment later."""

_RECHECK_S = 0.05
"""How often a worker that seems to be idle is checked for a direct step that has begun."""

_MOST_COPY_ATTEMPTS = 10

_GONE = "the worker is gone; send Reset for a new one"

_REPORTED_KINDS = {
    FailureKind.TIMEOUT,
    FailureKind.RAISED,
    FailureKind.CRASHED,
    FailureKind.BAD_OBSERVATION,
}
"""Failures of the environment, which are logged for its operator; other ones are the client's."""


class SessionEpisodeCounters:
    """The counters of a session's episodes over all its workers; an ``EpisodeCounterSource``.

    Args:
        progress: Progress of the latest worker; empty before there is one.
        endpoint: Knows which requests count.
    """

    def __init__(self, progress: SessionProgress, endpoint: EndpointSide) -> None:
        self.progress = progress
        self.endpoint = endpoint

    @property
    def now(self) -> EpisodeCounts:
        """After the last request that has succeeded."""
        return self.after(self.progress.done)

    @property
    def before(self) -> EpisodeCounts:
        """Before the last request."""
        return self.progress.counts_after(self.progress.done - 1)

    def copy(self) -> EpisodeCounts:
        """Return a copy of the counts ``now``, all of one moment although the worker goes on."""
        for _ in range(_MOST_COPY_ATTEMPTS):
            number = self.progress.done
            counts = self.now
            own = EpisodeCounts(
                counts.is_tracked.copy(),
                counts.step_counts.copy(),
                counts.cumulative_rewards.copy(),
            )
            if self.progress.done == number:  # else what was copied may be written to again
                break
        return own

    def after(self, number: int) -> EpisodeCounts:
        """Return the counts after request ``number``, or the last one before that counts."""
        return self.progress.counts_after(self.endpoint.last_counted(number))


class WorkerSupervisor:
    """Sends a session's commands to its worker, and restarts a worker that has crashed or hung.

    Args:
        pool: Provides the workers; the session has a place in it.
        grace_s: How long a request may go on after its deadline before its worker is killed.
        num_lanes: Width of the session.
        timer: Entered while a request waits for the worker; None: requests are not timed.
    """

    def __init__(
        self,
        pool: WorkerPool,
        grace_s: float,
        num_lanes: int,
        timer: AbstractContextManager[None] | None = None,
    ) -> None:
        self._pool = pool
        self._timer = timer or nullcontext()
        self.process: WorkerProcess | None = None
        """The latest worker; None: there has been none yet."""
        # Timers and the broker call from tasks that have no session in their log context.
        self._log_names = current()
        self.counts = pool.counts.open()
        """Counters of its lanes."""
        self._spin = AdaptiveSpin(_LONGEST_SPIN_S)
        progress = SessionProgress.local(num_lanes)
        self.endpoint = EndpointSide(progress)
        """Decides which of the session's requests count."""
        self.counting = SessionEpisodeCounters(progress, self.endpoint)
        """Counters of its episodes."""
        self._late_command = LateCommand(self.endpoint, grace_s, self.warn)
        self._next_report_s, self._report_pause_s = 0.0, _SLOW_RESET_S
        self._started: WorkerProcess | None = None
        """The process that takes the session's requests."""

    @property
    def progress(self) -> SessionProgress:
        """Progress in this session of the latest worker that got a request."""
        return self.counting.progress

    def require(self) -> WorkerProcess:
        """Return the process, which must exist."""
        assert self.process is not None, "the session lets no Step through before a Reset is done"
        return self.process

    async def request(
        self, command: Command, deadline: Deadline, number: int = 0
    ) -> Reply | Failure:
        """Have a numbered request executed by an idle worker, once.

        Args:
            command: The request for the worker.
            deadline: When it must be answered.
            number: The client's number of the request; 0: the client numbers none, and it gets the
                next one.
        """
        worker, endpoint = self.require(), self.endpoint
        number = number or endpoint.last_forwarded + 1
        if self._started is not worker:
            if not endpoint.may_start(number):
                message = f"request {number} is out of order: a former worker has come further"
                return Failure(FailureKind.OUT_OF_ORDER, message)
            self._start(worker, number)
        else:
            self.settle_numbers()  # the worker may have done more while this one waited for it
        endpoint.forward(number)
        reply = await self.call(command, deadline, number)
        if isinstance(reply, Failure):
            endpoint.failed(number)
        elif type(reply) is ResetReply:
            self.counts.resets += 1
        return reply

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        """See ``EndpointSide.skip``."""
        self.endpoint.skip(number, has_failed=has_failed)
        self.settle_numbers()

    def settle_numbers(self) -> None:
        """Send the worker the numbers that it must skip; see ``EndpointSide.take_skips``."""
        worker = self._started
        if worker is not None and worker.fileno() >= 0:
            for number in self.endpoint.take_skips():
                worker.submit(SkipRequestCommand(number))

    def _start(self, worker: WorkerProcess, number: int) -> None:
        worker.progress.start(number - 1, self.counting.after(number - 1))
        self._started, self.counting.progress = worker, worker.progress
        self.endpoint.start(number, worker.progress)
        self._pool.counts.attach(self.counts, worker.progress)

    async def call(self, command: Command, deadline: Deadline, number: int = 0) -> Reply | Failure:
        """Have ``command`` executed by an idle worker; with a number, it is a request."""
        worker = self.require()
        if worker.fileno() < 0:
            return Failure(FailureKind.CRASHED, _GONE)
        self.endpoint.command_sent()
        with self._timer:
            worker.submit(command, number)
            is_alone = self._pool.num_sessions == 1  # else other sessions would wait for the loop
            if is_alone:
                self._spin.spin(worker.advance)
            if not await self._wait_for_reply(worker, deadline.at_s):
                return self._late(worker, deadline.timeout_ms)
            if is_alone:
                self._spin.learn()
            return await self._received_reply(worker)

    async def _wait_for_reply(self, worker: WorkerProcess, deadline_s: float | None) -> bool:
        """Wait as ``wait_for_reply`` does; log resets that take long meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            until_s = loop.time() + _LOOK_EVERY_S
            if deadline_s is not None and deadline_s <= until_s:
                return await wait_for_reply(worker, deadline_s)
            if await wait_for_reply(worker, until_s):
                return True
            self.report_resets()

    def report_resets(self) -> None:
        """Log how far the resets of the request in progress are, if they take long."""
        progress, now_s = self.progress, asyncio.get_running_loop().time()
        num_reset, num_lanes = progress.resets
        took_s = progress.elapsed_ns / 1e9
        is_slow = progress.is_busy and num_lanes and took_s >= _SLOW_RESET_S
        # Less and less often, for an environment may reset for some seconds with every step.
        if not is_slow or now_s < self._next_report_s:
            return
        self._next_report_s = now_s + self._report_pause_s
        self._report_pause_s = min(2 * self._report_pause_s, _LONGEST_REPORT_PAUSE_S)
        with logged_as(*self._log_names):
            _LOG.info(
                "resetting: %d of %d lanes after %.0f s",
                num_reset,
                num_lanes,
                took_s,
                extra=facts(
                    "resetting", num_reset=num_reset, num_lanes=num_lanes, took_s=round(took_s, 3)
                ),
            )

    async def call_after_step(self, command: Command, timeout_ms: int) -> Reply | Failure:
        """Have ``command`` executed after the direct step that may be in progress.

        Args:
            command: Not one of the session's requests.
            timeout_ms: Timeout after the step, which keeps its own deadline; 0: none.
        """
        worker = self.require()
        if worker.fileno() < 0:
            return Failure(FailureKind.CRASHED, _GONE)
        self.endpoint.command_sent()
        worker.submit(command)
        progress, loop = worker.progress, asyncio.get_running_loop()
        deadline: Deadline | None = None
        while True:
            is_stepping = progress.is_busy
            number, limit_ms, left_s = progress.begun, progress.timeout_ms, progress.remaining_s
            if is_stepping:
                until_s = None if left_s is None else loop.time() + left_s
            else:
                deadline = deadline or Deadline.after(timeout_ms)
                # One more step may begin just now; the command is executed before a second one.
                until_s = loop.time() + _RECHECK_S
                until_s = until_s if deadline.at_s is None else min(until_s, deadline.at_s)
            if await wait_for_reply(worker, until_s):
                break
            if is_stepping and progress.done < number:
                return self._late(worker, limit_ms, observer_grace_s=_OBSERVER_GRACE_S)
            if deadline is not None and not progress.is_busy and deadline.has_passed:
                return self._late(
                    worker, timeout_ms, "the idle environment's process has not answered within"
                )
        return await self._received_reply(worker)

    async def _received_reply(self, worker: WorkerProcess) -> Reply | Failure:
        reply = await take_reply(worker)
        self.endpoint.reply_received()
        if isinstance(reply, Failure) and reply.kind in _REPORTED_KINDS:
            self._report(reply)
        return reply

    def _late(
        self,
        worker: WorkerProcess,
        timeout_ms: int,
        message: str = "no result within",
        observer_grace_s: float = 0.0,
    ) -> Failure:
        """Return the failure of a late command, which ``worker`` finishes in vain."""
        self.endpoint.missed_deadline()
        self._late_command.finish(worker, observer_grace_s)
        return self.timed_out(message, timeout_ms)

    async def send(self, command: Command) -> bool:
        """Send an idle worker a command without a reply; return whether it was sent soon.

        The rest of a command is sent before the next one.
        """
        worker, loop = self.require(), asyncio.get_running_loop()
        worker.submit(command)
        until_s = loop.time() + _LONGEST_SENDING_S
        # A command larger than the socket's buffer is sent only as the worker reads.
        while worker.is_sending and worker.fileno() >= 0:
            if loop.time() >= until_s:
                return False
            await asyncio.sleep(_SENDING_PAUSE_S)
            worker.advance()
        return True

    def call_without_reply(self, command: Command) -> None:
        """Have ``command`` executed after the worker's present work; both results are dropped."""
        worker = self.require()
        self.endpoint.command_sent()
        worker.submit(command)
        self._late_command.finish(worker)

    async def make_ready(
        self, deadline: Deadline, before_restart: Callable[[], None]
    ) -> Failure | None:
        """Make sure that there is an idle worker: restart one that has crashed or was killed.

        Returns the failure if there is none in time.

        Args:
            deadline: When it must be there.
            before_restart: Called before a worker is started.

        Raises:
            CapacityError: The endpoint's machine lets it start no process for a new session.
        """
        failure = await self.make_idle(deadline)
        if failure is not None or (self.process is not None and self.process.is_alive):
            return failure
        before_restart()
        try:
            with self._timer:
                async with asyncio.timeout_at(deadline.at_s):
                    await self._pool.discard(self.process)
                    self.process = await self._pool.take()
        except TimeoutError:
            # It goes on starting; the next Reset finds it.
            return self.timed_out(NOT_STARTED, deadline.timeout_ms)
        except EnvStartError as error:
            return self.failed(FailureKind.CRASHED, str(error), error.traceback_text)
        except CapacityError as error:
            if self.process is None:
                raise
            return self.failed(FailureKind.CRASHED, error.message)
        return None

    async def make_idle(self, deadline: Deadline) -> Failure | None:
        """Wait for a worker that is still busy; return the failure if it stays so."""
        try:
            with self._timer:
                async with asyncio.timeout_at(deadline.at_s):
                    await self._late_command.wait()
        except TimeoutError:
            return self.timed_out("still busy with an earlier request after", deadline.timeout_ms)
        return None

    def release(self, *, is_idle: bool) -> None:
        """Give the worker back; to be called once.

        Args:
            is_idle: Whether no direct step keeps it busy; a busy worker is killed.
        """
        self._late_command.cancel()
        self._pool.counts.close(self.counts)
        self._pool.release(self.process, is_idle=self.endpoint.is_idle and is_idle)

    def failed(self, kind: FailureKind, message: str, debug_info: str = "") -> Failure:
        """Log a failure of the environment, and return it."""
        failure = Failure(kind, message, debug_info)
        self._report(failure)
        return failure

    def timed_out(self, message: str, timeout_ms: int) -> Failure:
        """Log the failure of a request that took longer than its limit, and return it.

        The log also has the lanes, and the limit that a user of our clients has set: they leave the
        endpoint less than that, see ``protocol.client_session.endpoint_timeout_ms``.
        """
        num_reset, to_reset = self.progress.resets
        if self.progress.is_busy and to_reset:
            slow = f"the reset of {to_reset} lane{'s'[: to_reset > 1]}"
            message = f"{message} {timeout_ms} ms: {slow}, of which {num_reset} had been reset"
        else:
            message = f"{message} {timeout_ms} ms"
        failure = Failure(FailureKind.TIMEOUT, message)
        num_lanes = self.process.contract.num_envs if self.process is not None else 1
        lanes = f"lanes 0 to {num_lanes - 1}, which step together" if num_lanes > 1 else "lane 0"
        self._report(
            failure,
            f", in {lanes}, after {self.counts.num_steps} vector steps of the session (a client of "
            f"rlmesh-ray with a limit of {timeout_ms / 900:.3g} s leaves the endpoint that long)",
        )
        return failure

    def _report(self, failure: Failure, detail: str = "") -> None:
        with logged_as(*self._log_names):
            self._pool.failures.note(failure, detail)

    def warn(self, message: str, *values: object) -> None:
        """Log a warning about this session."""
        with logged_as(*self._log_names):
            _LOG.warning(message, *values)

    def note_error(self, code: str) -> None:
        """Count an error that a request was answered with."""
        self._pool.counts.sessions.note_error(code)


def as_failure(reply: Any) -> Failure:
    """Return ``reply`` if it is a failure, else a failure about its unexpected type."""
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")
