"""The road between the client and the worker of one session, as the endpoint supervises it.

See ``transport.frames`` for what a road is.
"""

import socket

from rlmesh_ray.envs.commands import (
    CloseDirectCommand,
    Command,
    OpenDirectCommand,
    OpenDirectRefused,
    OpenDirectReply,
    Reply,
    SetEpisodesCommand,
)
from rlmesh_ray.protocol.episodes import EpisodeStart
from rlmesh_ray.protocol.outcomes import Failure, FailureKind
from rlmesh_ray.server.session_worker import SessionWorker
from rlmesh_ray.transport.deadline_watch import DeadlineWatch
from rlmesh_ray.transport.direct_handle import DirectHandle


class TransportSupervisor:
    """Lends the worker's road, and keeps its deadlines.

    Args:
        worker: The session's.
    """

    def __init__(self, worker: SessionWorker) -> None:
        self._worker = worker
        # The latest; it may have been cut.
        self._direct: DirectHandle | None = None
        self._watch: DeadlineWatch | None = None
        self._timeout_ms = 0
        self._overdue: Failure | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in progress over the road."""
        return self._is_there and self._worker.progress.is_busy

    @property
    def num_begun(self) -> int:
        """Grows with each request that the worker begins."""
        return self._worker.progress.begun

    @property
    def _is_there(self) -> bool:
        return self._direct is not None and not self._direct.is_disconnected

    async def open(
        self, timeout_ms: int, connection: socket.socket | None = None, *, tag_arrays: bool
    ) -> DirectHandle | None:
        """Let the client ask the worker for steps directly; None: there is no idle worker.

        To be called between requests. Steps are executed over the road after ``set_episodes``.

        Args:
            timeout_ms: What the client's steps may take.
            connection: To the client, owned by the road that is returned; None: over shared memory.
            tag_arrays: Whether it knows arrays in infos.
        """
        process, progress = self._worker.process, self._worker.progress
        if process is None or not self._worker.endpoint.is_at_rest:
            return None
        self.disconnect()  # an earlier one, which its client has left
        try:
            direct = (
                process.open_direct_shared_memory()
                if connection is None
                else process.open_direct_tcp(connection)
            )
        except OSError as error:
            self._worker.warn("no direct road for a session: %s", error)
            return None
        # As long as a step: a worker that is stopped for less costs nothing.
        command = OpenDirectCommand(tag_arrays, direct.num_descriptors)
        reply = await self.call_after_step(command, timeout_ms)
        if not isinstance(reply, OpenDirectReply):
            if isinstance(reply, OpenDirectRefused):
                self._worker.warn("no direct road for a session: %s", reply.message)
            direct.disconnect()
            return None
        self._direct, self._timeout_ms = direct, timeout_ms
        self._worker.counts.transport = direct.transport
        # Over TCP only the endpoint hears of a worker's death: the connection is its own, too.
        self._watch = DeadlineWatch(
            progress,
            timeout_ms,
            self._end_overdue,
            lambda: process.is_alive and not direct.has_ended,
            self.disconnect,
        )
        return direct

    async def set_episodes(self, episodes: tuple[EpisodeStart | None, ...]) -> None:
        """Have steps of ``episodes`` executed over the road, from now on.

        A worker that does not read what it is told loses the road: with half a command it would
        wait for the rest, which goes with the next request on the stream, and has its deadline.
        """
        if self._is_there and not await self._worker.tell(SetEpisodesCommand(episodes)):
            self._worker.warn(
                "the session's steps become messages: its environment's process, which should be "
                "idle, does not read what it is told"
            )
            self.disconnect()

    def clear_episodes(self) -> None:
        """Have all steps that come over the road handed over, until ``set_episodes``."""
        if self._is_there:
            self._worker.require().submit(SetEpisodesCommand(()))

    async def close(self) -> None:
        """Have the next requests come over the stream, after the step that is in progress."""
        if self._is_there and self._worker.endpoint.is_at_rest:
            await self.call_after_step(CloseDirectCommand(), self._timeout_ms)
            self.disconnect()

    async def call_after_step(self, command: Command, timeout_ms: int) -> Reply | Failure:
        """See ``SessionWorker.call_after_step``; a direct step that is late meanwhile is late."""
        reply = await self._worker.call_after_step(command, timeout_ms)
        if isinstance(reply, Failure) and reply.kind is FailureKind.TIMEOUT:
            number = self._worker.progress.begun
            self.disconnect()
            if self._worker.endpoint.disconnect_overdue(number):
                self._overdue = reply
        return reply

    def disconnect(self) -> None:
        """End the road at once, if there is one."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None  # it knows us: memory would wait for the collector of such circles
        if self._direct is not None:  # the broker has cut it where its client did not take it
            self._direct.disconnect()
            self._direct = None
            self._worker.counts.transport = "grpc"

    @property
    def overdue(self) -> Failure:
        """The answer to the step that is overdue."""
        assert self._overdue is not None, "a step is overdue"
        return self._overdue

    def _end_overdue(self, number: int) -> bool:
        """Give up a step that has missed its deadline: its client hears of it on the stream."""
        if not self._worker.endpoint.is_idle:
            return False  # who waits for the worker keeps the deadline
        timeout_ms = self._worker.progress.timeout_ms
        # An answer that has left before this counts; none leaves after it.
        self.disconnect()
        if self._worker.endpoint.disconnect_overdue(number):
            self._overdue = self._worker.timed_out("no result within", timeout_ms)
        self._worker.call_without_reply(CloseDirectCommand())
        return True
