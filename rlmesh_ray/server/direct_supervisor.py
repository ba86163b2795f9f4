"""The direct connection between a session's client and worker, supervised by the endpoint.

See ``transport.direct_frames`` for direct connections.
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
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.server.worker_supervisor import WorkerSupervisor
from rlmesh_ray.transport.direct_deadline_watch import DirectDeadlineWatch
from rlmesh_ray.transport.direct_handle import DirectHandle


class DirectSupervisor:
    """Opens a session's direct connection, and enforces the deadlines of its steps.

    Args:
        worker: Worker of the session.
    """

    def __init__(self, worker: WorkerSupervisor) -> None:
        self._worker = worker
        # The latest; it may be disconnected.
        self._direct: DirectHandle | None = None
        self._watch: DirectDeadlineWatch | None = None
        self._timeout_ms = 0
        self._overdue: Failure | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a step is in progress over the direct connection."""
        return self._is_connected and self._worker.progress.is_busy

    @property
    def num_begun(self) -> int:
        """Grows with each request that the worker begins."""
        return self._worker.progress.begun

    @property
    def _is_connected(self) -> bool:
        return self._direct is not None and not self._direct.is_disconnected

    async def open(
        self, timeout_ms: int, connection: socket.socket | None = None, *, tag_arrays: bool
    ) -> DirectHandle | None:
        """Open a direct connection from the client to the worker; None: there is no idle worker.

        To be called between requests. Steps are executed over it after ``set_episodes``.

        Args:
            timeout_ms: Timeout of the client's steps.
            connection: TCP connection to the client, owned by the handle that is returned; None:
                shared memory.
            tag_arrays: Whether the client knows arrays in infos.
        """
        process, progress = self._worker.process, self._worker.progress
        if process is None or not self._worker.endpoint.is_at_rest:
            return None
        self.disconnect()  # an earlier one, which the client does not use any more
        try:
            direct = (
                process.open_direct_shared_memory()
                if connection is None
                else process.open_direct_tcp(connection)
            )
        except OSError as error:
            self._worker.warn("no direct connection for a session: %s", error)
            return None
        # As long as a step may take: a worker that is paused for less costs nothing.
        command = OpenDirectCommand(tag_arrays, direct.num_descriptors)
        reply = await self.call_after_step(command, timeout_ms)
        if not isinstance(reply, OpenDirectReply):
            if isinstance(reply, OpenDirectRefused):
                self._worker.warn("no direct connection for a session: %s", reply.message)
            direct.disconnect()
            return None
        self._direct, self._timeout_ms = direct, timeout_ms
        self._worker.counts.transport = direct.transport
        # Over TCP only the endpoint notices a worker's death: it holds the connection, too.
        self._watch = DirectDeadlineWatch(
            progress,
            timeout_ms,
            self._end_overdue,
            lambda: process.is_alive and not direct.has_ended,
            self.disconnect,
            self._worker.report_resets,
        )
        return direct

    async def set_episodes(self, episodes: tuple[EpisodeStart | None, ...]) -> None:
        """Have steps of ``episodes`` executed over the direct connection, from now on.

        A worker that does not read the command loses the connection: with half a command it would
        wait for the rest, which is sent with the next request on the stream, and its deadline.
        """
        if self._is_connected and not await self._worker.send(SetEpisodesCommand(episodes)):
            self._worker.warn(
                "the session's steps become messages: its environment's process, which should be "
                "idle, does not read its commands"
            )
            self.disconnect()

    def clear_episodes(self) -> None:
        """Have the worker pass direct steps to the stream, until ``set_episodes``."""
        if self._is_connected:
            self._worker.require().submit(SetEpisodesCommand(()))

    async def close(self) -> None:
        """Move the next requests to the stream, after the step that is in progress."""
        if self._is_connected and self._worker.endpoint.is_at_rest:
            await self.call_after_step(CloseDirectCommand(), self._timeout_ms)
            self.disconnect()

    async def call_after_step(self, command: Command, timeout_ms: int) -> Reply | Failure:
        """See ``WorkerSupervisor.call_after_step``; a late direct step counts as overdue."""
        reply = await self._worker.call_after_step(command, timeout_ms)
        if isinstance(reply, Failure) and reply.kind is FailureKind.TIMEOUT:
            number = self._worker.progress.begun
            self.disconnect()
            if self._worker.endpoint.disconnect_overdue(number):
                self._overdue = reply
        return reply

    def disconnect(self) -> None:
        """End the direct connection at once, if there is one."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None  # breaks a reference cycle, which would keep the memory
        if self._direct is not None:  # the broker ends one that its client did not take
            self._direct.disconnect()
            self._direct = None
            self._worker.counts.transport = "grpc"

    @property
    def overdue(self) -> Failure:
        """The answer to the step that is overdue."""
        assert self._overdue is not None, "a step is overdue"
        return self._overdue

    def _end_overdue(self, number: int) -> bool:
        """Give up a step that has missed its deadline: its client gets the error on the stream."""
        if not self._worker.endpoint.is_idle:
            return False  # a request that waits for the worker enforces the deadline
        timeout_ms = self._worker.progress.timeout_ms
        # An answer that has left before this counts; none leaves after it.
        self.disconnect()
        if self._worker.endpoint.disconnect_overdue(number):
            self._overdue = self._worker.timed_out("no result within", timeout_ms)
        self._worker.call_without_reply(CloseDirectCommand())
        return True
