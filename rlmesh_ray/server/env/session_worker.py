"""The worker of one session, used from the event loop: deadlines, restarts, its direct connection.

A busy environment cannot be asked to stop. A worker that has missed a deadline finishes in vain,
or is killed after a grace time.
"""

import asyncio
import logging
import math
import socket
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlmesh_ray.envs.commands import (
    CloseDirectCommand,
    Command,
    DirectReply,
    OpenDirectCommand,
    Outcome,
    ResetReply,
    SetEpisodesCommand,
    SkipRequestCommand,
)
from rlmesh_ray.envs.worker_process import DirectHandle, WorkerProcess
from rlmesh_ray.errors import CapacityError, EnvStartError
from rlmesh_ray.polling import AdaptiveSpin
from rlmesh_ray.protocol.env_session import NOT_STARTED, EpisodeStart, Failure, FailureKind
from rlmesh_ray.server.endpoint.event_loop import in_thread
from rlmesh_ray.server.endpoint.log import current, facts, logged_as
from rlmesh_ray.server.env.worker_pool import WorkerPool
from rlmesh_ray.transport.exactly_once import EndpointSide, SessionProgress

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

_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S, _PART_OF_TIMEOUT = 0.25, 0.005, 0.1
"""How often a direct connection is looked at for an overdue step, and for the worker's death. A
step that begins after a look is seen at the next one; so the period is a part of the timeout."""

_GONE = "the worker is gone; send Reset for a new one"

_REPORTED_KINDS = {
    FailureKind.TIMEOUT,
    FailureKind.RAISED,
    FailureKind.CRASHED,
    FailureKind.BAD_OBSERVATION,
}
"""Failures of the environment, which are logged for its operator; other ones are the client's."""


class Deadline:
    """The time by which a request or call must be answered: after ``timeout_ms``; 0: never.

    It has already waited for its turn for ``waited_s``.
    """

    def __init__(self, timeout_ms: int, waited_s: float = 0.0) -> None:
        self.timeout_ms = timeout_ms
        left_s = timeout_ms / 1000 - waited_s if timeout_ms > 0 else math.inf
        self.at_s = asyncio.get_running_loop().time() + left_s
        """In the loop's time; infinity: never."""

    @property
    def has_passed(self) -> bool:
        return asyncio.get_running_loop().time() >= self.at_s


async def wait_for_reply(worker: WorkerProcess, deadline_s: float) -> bool:
    """Send the rest of the command, and wait until a reply has arrived or the worker has ended.

    Return False if the loop's time passed ``deadline_s`` first. The worker must not have ended.
    """
    channel = worker.channel
    if channel.has_message:  # read already: the socket does not become readable for it again
        return True
    loop = asyncio.get_running_loop()
    arrival: asyncio.Future[bool] = loop.create_future()
    descriptor = channel.connection.fileno()

    def advance() -> None:
        if channel.advance():
            if not arrival.done():
                arrival.set_result(True)
        elif is_sending and not channel.is_sending:
            loop.remove_writer(descriptor)

    def give_up() -> None:
        if not arrival.done():
            arrival.set_result(False)

    is_sending = channel.is_sending
    timer = loop.call_at(deadline_s, give_up)
    loop.add_reader(descriptor, advance)
    if is_sending:
        loop.add_writer(descriptor, advance)
    try:
        return await arrival
    finally:
        loop.remove_reader(descriptor)
        if is_sending:
            loop.remove_writer(descriptor)
        timer.cancel()


async def take_reply(worker: WorkerProcess) -> Outcome:
    if worker.channel.has_message:
        return worker.receive()
    # The system may take a moment to end a large process.
    return await in_thread(worker.receive)


class SessionWorker:
    """Sends a session's commands to its worker, and restarts a worker that has crashed or hung.

    The session has a place in ``pool``. ``timer`` is entered while a request waits for the worker.
    """

    def __init__(
        self,
        pool: WorkerPool,
        num_lanes: int,
        timer: AbstractContextManager[None] | None = None,
    ) -> None:
        self._pool, self._num_lanes = pool, num_lanes
        self._timer = timer or nullcontext()
        self.process: WorkerProcess | None = None
        """The latest worker; None: there has been none yet."""
        # Timers and the broker call from tasks that have no session in their log context.
        self._log_names = current()
        self.counts = pool.counts.open()
        """Counters of its lanes."""
        self._spin = AdaptiveSpin(_LONGEST_SPIN_S)
        self.endpoint = EndpointSide(SessionProgress.local(num_lanes))
        self._next_report_s, self._report_pause_s = 0.0, _SLOW_RESET_S
        self._finishing: asyncio.Task[None] | None = None
        """Waits for a worker that finishes a command in vain."""
        self._direct: DirectHandle | None = None
        """The latest direct connection; it may be disconnected."""
        self._direct_timeout_ms = 0
        self._watch: asyncio.TimerHandle | None = None
        self.overdue: Failure | None = None
        """The failure of the latest step on a direct connection that missed its deadline."""

    @property
    def progress(self) -> SessionProgress:
        """Progress in this session of the latest worker that got a request."""
        return self.endpoint.progress

    def require(self) -> WorkerProcess:
        assert self.process is not None, "the session lets no Step through before a Reset is done"
        return self.process

    async def request(self, command: Command, deadline: Deadline, number: int = 0) -> Outcome:
        """Have a request executed by an idle worker, once.

        ``number`` is the one that the client gave the request; 0: none, so it gets the next one.
        """
        worker, endpoint = self.process, self.endpoint
        assert worker is not None, "a Reset has made one ready"
        number = number or endpoint.last_forwarded + 1
        if endpoint.progress is not worker.progress:  # it is another worker than before
            if not endpoint.may_start(number):
                message = f"request {number} is out of order: a former worker has come further"
                return Failure(FailureKind.OUT_OF_ORDER, message)
            endpoint.start(number, worker.progress)
            self.counts.progress = worker.progress
        elif endpoint.skipped:  # the worker may have done more while this one waited for it
            self.settle_numbers()
        endpoint.forward(number)
        if worker.channel.connection.fileno() < 0:
            reply: Outcome = Failure(FailureKind.CRASHED, _GONE)
        else:
            endpoint.command_sent()
            with self._timer:
                worker.submit(command, number)
                reply = await self._reply(worker, deadline)
        if isinstance(reply, Failure):
            endpoint.failed(number)
        elif type(reply) is ResetReply:
            self.counts.resets += 1
        return reply

    async def _reply(self, worker: WorkerProcess, deadline: Deadline) -> Outcome:
        """Wait for the reply to a request; log resets that take long meanwhile."""
        channel, loop = worker.channel, asyncio.get_running_loop()
        is_alone = self._pool.num_sessions == 1  # else other sessions would wait for the loop
        if is_alone:
            self._spin.spin(channel.advance)
        while not channel.has_message:
            until_s = min(loop.time() + _LOOK_EVERY_S, deadline.at_s)
            if await wait_for_reply(worker, until_s):
                break
            if deadline.has_passed:
                return self._late(worker, deadline.timeout_ms)
            self.report_resets()
        if is_alone:
            self._spin.learn()
        return await self._received_reply(worker)

    def skip(self, number: int, *, has_failed: bool = False) -> None:
        self.endpoint.skip(number, has_failed=has_failed)
        self.settle_numbers()

    def settle_numbers(self) -> None:
        """Send the worker the numbers that it must skip; see ``EndpointSide.take_skips``."""
        worker = self.process
        # A new worker begins with the next request, beyond the numbers that are skipped.
        if worker is None or worker.progress is not self.progress:
            return
        if worker.channel.connection.fileno() >= 0:
            for number in self.endpoint.take_skips():
                worker.submit(SkipRequestCommand(number))

    def report_resets(self) -> None:
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

    async def call_after_step(self, command: Command, timeout_ms: int) -> Outcome:
        """Have a command that is not a request executed after the direct step in progress, if any.

        The timeout begins after the step, which keeps its own deadline; 0: none.
        """
        worker = self.require()
        if worker.channel.connection.fileno() < 0:
            return Failure(FailureKind.CRASHED, _GONE)
        self.endpoint.command_sent()
        worker.submit(command)
        progress, loop = worker.progress, asyncio.get_running_loop()
        deadline: Deadline | None = None
        while True:
            is_stepping = progress.is_busy
            number, limit_ms, left_s = progress.begun, progress.timeout_ms, progress.remaining_s
            if is_stepping:
                until_s = loop.time() + left_s
            else:
                deadline = deadline or Deadline(timeout_ms)
                # One more step may begin just now; the command is executed before a second one.
                until_s = min(loop.time() + _RECHECK_S, deadline.at_s)
            if await wait_for_reply(worker, until_s):
                return await self._received_reply(worker)
            if is_stepping and progress.done < number:
                failure = self._late(worker, limit_ms, observer_grace_s=_OBSERVER_GRACE_S)
                break
            if deadline is not None and not progress.is_busy and deadline.has_passed:
                text = "the idle environment's process has not answered within"
                failure = self._late(worker, timeout_ms, text)
                break
        # No step on the direct connection has let the command through.
        number = self.progress.begun
        self.disconnect()
        if self.endpoint.disconnect_overdue(number):
            self.overdue = failure
        return failure

    async def _received_reply(self, worker: WorkerProcess) -> Outcome:
        reply = worker.receive() if worker.channel.has_message else await take_reply(worker)
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
        """Return the failure of a late command, which ``worker`` finishes in vain.

        An observer's picture may take ``observer_grace_s`` after a late step.
        """
        self.endpoint.missed_deadline()
        self._finishing = asyncio.ensure_future(self._finish(worker, observer_grace_s))
        return self.timed_out(message, timeout_ms)

    async def _finish(self, worker: WorkerProcess, observer_grace_s: float = 0.0) -> None:
        """Let ``worker`` finish a command in vain, and kill it if that takes too long."""
        grace_s = self._pool.step_grace_s
        try:
            if worker.channel.connection.fileno() < 0:  # it has died meanwhile
                return
            loop = asyncio.get_running_loop()
            has_finished = await wait_for_reply(worker, loop.time() + grace_s)
            if not has_finished and observer_grace_s and not worker.progress.is_busy:
                has_finished = await wait_for_reply(worker, loop.time() + observer_grace_s)
            if has_finished:
                await take_reply(worker)
            else:
                self.warn("still busy %g s after a deadline: the worker is killed", grace_s)
                await in_thread(worker.kill)
        finally:
            self.endpoint.reply_received()
            self._finishing = None

    async def make_ready(self, deadline: Deadline) -> Failure | None:
        """Make sure that there is an idle worker: restart one that has crashed or was killed.

        Return the failure if none is ready in time.

        Raises:
            CapacityError: The endpoint's machine lets it start no process for a new session.
        """
        failure = await self.make_idle(deadline)
        if failure is not None or (self.process is not None and self.process.is_alive):
            return failure
        self.disconnect()
        try:
            with self._timer:
                async with asyncio.timeout_at(deadline.at_s):
                    self.process = await self._pool.take(lost=self.process)
        except TimeoutError:
            # It continues to start; the next Reset finds it.
            return self.timed_out(NOT_STARTED, deadline.timeout_ms)
        except EnvStartError as error:
            failure = Failure(FailureKind.CRASHED, str(error), error.traceback_text)
        except CapacityError as error:
            if self.process is None:
                raise
            failure = Failure(FailureKind.CRASHED, error.message)
        else:
            return None
        self._report(failure)
        return failure

    async def make_idle(self, deadline: Deadline) -> Failure | None:
        try:
            with self._timer:
                async with asyncio.timeout_at(deadline.at_s):
                    while self._finishing is not None and not self.endpoint.is_at_rest:
                        await asyncio.shield(self._finishing)
        except TimeoutError:
            return self.timed_out("still busy with an earlier request after", deadline.timeout_ms)
        return None

    def release(self) -> None:
        """Give the worker back, and end the direct connection; to be called once.

        A busy worker, also with a step of a direct connection that has ended, is killed.
        """
        is_idle = self.endpoint.is_idle and not self.progress.is_busy
        self.disconnect()
        if self._finishing is not None:
            self._finishing.cancel()
        self._pool.counts.close(self.counts)
        self._pool.release(self.process, is_idle=is_idle)

    # --- the direct connection --------------------------------------------------------------

    @property
    def _is_connected(self) -> bool:
        return self._direct is not None and not self._direct.is_disconnected

    @property
    def is_direct_busy(self) -> bool:
        return self._is_connected and self.progress.is_busy

    async def open_direct(
        self, timeout_ms: int, connection: socket.socket | None, *, tag_arrays: bool
    ) -> DirectHandle | None:
        """Open a direct connection from the client to the worker; None: no worker is idle.

        To be called between requests. Steps are executed over it after ``set_episodes``. The handle
        owns ``connection``, which is a TCP connection; None: shared memory.
        """
        process = self.process
        if process is None or not self.endpoint.is_at_rest:
            return None
        self.disconnect()  # an earlier one, which the client does not use any more
        try:
            direct = (
                process.open_direct_shared_memory()
                if connection is None
                else process.open_direct_tcp(connection)
            )
        except OSError as error:
            self.warn("no direct connection for a session: %s", error)
            return None
        # As long as a step may take: a worker that is paused for less costs nothing.
        command = OpenDirectCommand(tag_arrays, direct.num_descriptors)
        reply = await self.call_after_step(command, timeout_ms)
        if not isinstance(reply, DirectReply):
            if isinstance(reply, Failure) and reply.kind is FailureKind.BAD_REQUEST:
                self.warn("no direct connection for a session: %s", reply.message)
            direct.disconnect()
            return None
        self._direct, self._direct_timeout_ms = direct, timeout_ms
        self.counts.transport = direct.transport
        self._watch_soon()
        return direct

    async def set_episodes(self, episodes: tuple[EpisodeStart | None, ...]) -> None:
        """Have steps of ``episodes`` executed over the direct connection, from now on.

        With none of them the worker passes direct steps to the stream. A worker that does not read
        the command loses the connection: with half a command it would wait for the rest, which is
        sent with the next request on the stream, and its deadline.
        """
        if not self._is_connected:
            return
        worker, loop = self.require(), asyncio.get_running_loop()
        worker.submit(SetEpisodesCommand(episodes))
        channel, until_s = worker.channel, loop.time() + _LONGEST_SENDING_S
        # A command larger than the socket's buffer is sent only as the worker reads.
        while channel.is_sending and channel.connection.fileno() >= 0:
            if loop.time() >= until_s:
                self.warn(
                    "the session's steps become messages: its environment's process, which should "
                    "be idle, does not read its commands"
                )
                self.disconnect()
                return
            await asyncio.sleep(_SENDING_PAUSE_S)
            channel.advance()

    async def close_direct(self) -> None:
        """Move the next requests to the stream, after the step that is in progress."""
        if self._is_connected and self.endpoint.is_at_rest:
            await self.call_after_step(CloseDirectCommand(), self._direct_timeout_ms)
            self.disconnect()

    def disconnect(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._direct is not None:  # the broker ends one that its client did not take
            self._direct.disconnect()
            self._direct = None
            self.counts.transport = "grpc"

    def _watch_soon(self) -> None:
        """Look at the direct connection in a moment, and when its step is late at the latest."""
        period_s, progress = _LONGEST_PERIOD_S, self.progress
        if self._direct_timeout_ms:
            period_s = min(period_s, _PART_OF_TIMEOUT * self._direct_timeout_ms / 1000)
        if progress.is_busy:
            period_s = min(period_s, progress.remaining_s)
        after_s = max(period_s, _SHORTEST_PERIOD_S)
        self._watch = asyncio.get_running_loop().call_later(after_s, self._watch_direct)

    def _watch_direct(self) -> None:
        """Enforce the deadline of the step that is in progress on the direct connection."""
        process, direct, progress = self.require(), self._direct, self.progress
        # Over TCP only the endpoint notices a worker's death: it holds the connection, too.
        if direct is None or not process.is_alive or direct.has_ended:
            self.disconnect()
            return
        number, timeout_ms = progress.overdue_number, progress.timeout_ms
        # A request that waits for the worker enforces the deadline itself.
        if not number or not self.endpoint.is_idle:
            if progress.is_busy:
                self.report_resets()
            self._watch_soon()
            return
        # The step's client gets the error on the stream. An answer that has left before this
        # counts; none leaves after it.
        self.disconnect()
        if self.endpoint.disconnect_overdue(number):
            self.overdue = self.timed_out("no result within", timeout_ms)
        # After the worker's present work; both results are dropped.
        self.endpoint.command_sent()
        process.submit(CloseDirectCommand())
        self._finishing = asyncio.ensure_future(self._finish(process))

    # --- the log ----------------------------------------------------------------------------

    def timed_out(self, message: str, timeout_ms: int) -> Failure:
        """Log the failure of a request that took longer than its limit, and return it.

        The log also has the lanes, and the limit that a user of our clients has set: they leave the
        endpoint less than that, see ``protocol.client_session.endpoint_timeout_ms``.
        """
        message = f"{message} {timeout_ms} ms"
        num_reset, to_reset = self.progress.resets
        if self.progress.is_busy and to_reset:
            slow = f"the reset of {to_reset} lane{'s'[: to_reset > 1]}"
            message += f": {slow}, of which {num_reset} had been reset"
        failure = Failure(FailureKind.TIMEOUT, message)
        last = self._num_lanes - 1
        lanes = f"lanes 0 to {last}, which step together" if last else "lane 0"
        self._report(
            failure,
            f", in {lanes}, after {self.counts.read().num_steps} vector steps of the session "
            f"(a client of rlmesh-ray with a limit of {timeout_ms / 900:.3g} s leaves the endpoint "
            "that long)",
        )
        return failure

    def _report(self, failure: Failure, detail: str = "") -> None:
        with logged_as(*self._log_names):
            self._pool.failures.note(failure, detail)

    def warn(self, message: str, *values: object) -> None:
        with logged_as(*self._log_names):
            _LOG.warning(message, *values)

    def note_error(self, code: str) -> None:
        self._pool.counts.sessions.errors[code] += 1


def as_failure(reply: Any) -> Failure:
    if isinstance(reply, Failure):
        return reply
    return Failure(FailureKind.CRASHED, f"the worker answered with {type(reply).__name__}")
