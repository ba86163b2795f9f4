"""WorkerProcess: the endpoint's handle on an env worker.

It has no thread and no event loop: callers wait on its channel. One command at a time; another
thread may call ``kill`` meanwhile.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Sequence
from typing import Self

from rlmesh_ray.envs.child_process import ChildProcess, search_path
from rlmesh_ray.envs.commands import (
    CloseDirectReply,
    Command,
    OpenDirectReply,
    Outcome,
    Start,
    Started,
    StartFailed,
    StopCommand,
)
from rlmesh_ray.envs.env_source import EnvSource
from rlmesh_ray.envs.worker_channel import WorkerChannel, command_frame, encode
from rlmesh_ray.errors import CodecError, ConfigurationError, EnvStartError
from rlmesh_ray.options import SHARED_MEMORY, TCP
from rlmesh_ray.protocol.failure_effects import Failure, FailureKind
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.transport.session_progress import SessionProgress
from rlmesh_ray.transport.step_buffers import StepBuffers, create_memory, create_step_buffers

_UNREADABLE = "the endpoint cannot read what the environment's process sent"


class DirectHandle:
    """Disconnects a direct connection, which the endpoint itself does not use.

    Args:
        to_send: Descriptors of the client's step buffers and of the eventfds; owned. Empty for TCP.
        connection: The socket to the client, or the client's end; owned and kept: shutting it down
            disconnects both client and worker.
    """

    def __init__(self, to_send: Sequence[int], connection: socket.socket) -> None:
        self._to_send = list(to_send)
        self._connection = connection
        self.num_descriptors = 1 + len(to_send)
        """Number of descriptors that the worker receives for the connection."""

    @property
    def transport(self) -> str:
        """Transport of the steps: ``"shared_memory"`` or ``"tcp"``."""
        return SHARED_MEMORY if self.num_descriptors > 1 else TCP

    @property
    def is_disconnected(self) -> bool:
        return self._connection.fileno() < 0

    @property
    def has_ended(self) -> bool:
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send_descriptors(self, to: socket.socket, hello: bytes) -> None:
        """Send ``hello`` and the client's descriptors to a client; never blocks.

        Raises:
            OSError: It cannot be sent.
        """
        buffers, *eventfds = self._to_send
        descriptors = [buffers, self._connection.fileno(), *eventfds]
        socket.send_fds(to, [hello], descriptors, socket.MSG_DONTWAIT)
        self._close_descriptors()

    def send(self, data: bytes) -> None:
        """Send bytes to a TCP client, before its first request; never blocks.

        Raises:
            OSError: They cannot be sent.
        """
        self._connection.send(data, socket.MSG_DONTWAIT)

    def disconnect(self) -> None:
        """Disconnect client and worker at once. Idempotent."""
        self._close_descriptors()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _close_descriptors(self) -> None:
        while self._to_send:
            os.close(self._to_send.pop())


class WorkerProcess:
    """A running worker; made by ``start``, ended by ``close`` or ``kill``."""

    def __init__(
        self,
        process: ChildProcess,
        started: Started,
        buffers: StepBuffers,
        progress: SessionProgress,
        descriptors: socket.socket,
    ) -> None:
        self.process = process
        """The operating system's process; ``end`` does not wait for the environment."""
        self.channel = process.channel
        """Its commands and replies; the descriptor is negative when the worker has ended."""
        self._own_buffers = self._direct_buffers = buffers
        self._descriptors = descriptors
        self.contract = started.contract
        """Contract of the environment."""
        self.steps_subsets = started.steps_subsets
        """Whether a StepCommand may name its lanes."""
        self.pid = started.pid
        """Id of the process that the environment runs in."""
        self.progress = progress
        """Progress of the session; readable after the worker's death, too."""
        self.buffers = buffers
        """In shared memory. Actions are written before a StepCommand; observations, rewards and
        flags are valid from the reply to the next command. Text is sent in the messages; empty
        strings stand for it here."""

    @classmethod
    def start(
        cls,
        source: EnvSource,
        *,
        validation: ValidationMode,
        process: ChildProcess | None = None,
    ) -> Self:
        """Start a worker; blocks until its environment exists.

        Args:
            source: The environment.
            validation: Treatment of range violations.
            process: The process that becomes the worker, ended when the start fails; another
                thread may end it to abort the start. None: a new one.

        Raises:
            EnvStartError: The environment could not be created.
            ConfigurationError: This platform cannot pass descriptors to a process.
        """
        if not hasattr(socket, "send_fds"):
            raise ConfigurationError(
                f"environments cannot be hosted on {sys.platform}, which cannot share memory by "
                "descriptor; use Linux, macOS or WSL"
            )
        process = process or ChildProcess.start()
        try:
            started = _handshake(process, source, validation)
            return cls(process, started, *_share_memory(process.channel, started.contract))
        except BaseException:
            process.end(0.0)
            raise

    @property
    def is_alive(self) -> bool:
        """Whether the process runs and its channel is open."""
        try:
            return bool(self.channel.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def submit(self, command: Command, number: int = 0) -> None:
        """Send as much of ``command`` as possible without blocking; the channel sends the rest.

        If the worker is gone, ``receive`` reports it.

        Args:
            command: The command.
            number: Number of its request; 0 for a command of the endpoint itself.
        """
        self.channel.queue_frame(command_frame(command, number))

    def open_direct_tcp(self, connection: socket.socket) -> DirectHandle:
        """Send a client's TCP connection to the worker. An OpenDirectCommand has to follow.

        Args:
            connection: The connection to the client; owned by the returned handle.

        Raises:
            OSError: A resource is exhausted, or the worker is gone; the connection is closed.
        """
        direct = DirectHandle([], connection)
        try:
            self._send_descriptors([connection.fileno()])
        except BaseException:
            direct.disconnect()
            raise
        self._direct_buffers = self._own_buffers
        return direct

    def open_direct_shared_memory(self) -> DirectHandle:
        """Create a shared-memory connection and send the worker's end of it.

        An OpenDirectCommand has to follow.

        Raises:
            OSError: A resource is exhausted, or the worker is gone.
        """
        with contextlib.ExitStack() as owned, contextlib.ExitStack() as given:
            buffers = create_step_buffers(self.contract)
            owned.callback(os.close, buffers)
            own_end, worker_end = socket.socketpair()
            owned.enter_context(worker_end)
            given.enter_context(own_end)
            eventfds: list[int] = []
            for _ in range(2):
                eventfds.append(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
                given.callback(os.close, eventfds[-1])
            direct = DirectHandle([os.dup(buffers), *eventfds], own_end)
            given.pop_all()
            try:
                self._direct_buffers = StepBuffers(buffers, self.contract)
                self._send_descriptors([worker_end.fileno(), buffers, *eventfds])
            except BaseException:
                direct.disconnect()
                raise
        return direct

    def _send_descriptors(self, descriptors: list[int]) -> None:
        socket.send_fds(self._descriptors, [b"\0"], descriptors, socket.MSG_DONTWAIT)

    def receive(self) -> Outcome:
        """Return the reply to the last command; blocks.

        Returns:
            The reply, or a Failure; of kind CRASHED if the process has died, after reaping it, and
            RAISED if the reply does not decode.
        """
        try:
            reply: Outcome = self.channel.receive()
        except (EOFError, OSError):
            self._descriptors.close()
            status = self.process.end()
            return Failure(
                FailureKind.CRASHED,
                f"the environment's process {status}",
                self.process.fault_log,
            )
        except CodecError as error:
            return Failure(FailureKind.RAISED, f"{_UNREADABLE}: {error}")
        match reply:
            case OpenDirectReply():
                self.buffers = self._direct_buffers
            case CloseDirectReply():
                self.buffers = self._own_buffers
        return reply

    def kill(self, *, spares_others: bool = False) -> None:
        """Kill the process and all processes of its environment.

        Blocks until they have ended, which takes a moment for large processes.

        Args:
            spares_others: See ``ChildProcess.end``.
        """
        self._descriptors.close()
        self.process.end(0.0, spares_others=spares_others)

    def close(self, timeout_s: float) -> None:
        """Ask the worker to close its environment and end; kill it after ``timeout_s``.

        A process that it shares with other workers goes on.
        """
        self.submit(StopCommand())
        self._descriptors.close()
        self.process.end(timeout_s, spares_others=True)


def _handshake(process: ChildProcess, source: EnvSource, validation: ValidationMode) -> Started:
    start = Start(source, validation, search_path(), os.environ.get("PYTHONPATH"))
    try:
        process.channel.send(encode(start))
        answer: Started | StartFailed = process.channel.receive()
    except (EOFError, OSError) as error:
        status = process.end()
        raise EnvStartError(
            f"cannot create {source.description}: its process {status}; see its output on "
            "standard error",
            process.fault_log,
        ) from error
    except CodecError as error:
        message = f"cannot create {source.description}: {_UNREADABLE}: {error}"
        raise EnvStartError(message) from error
    if isinstance(answer, StartFailed):
        process.end()  # not with a grace of 0: it may host the worker of another session, too
        raise EnvStartError(answer.message, answer.traceback_text, answer.is_wrong_usage)
    return answer


def _share_memory(
    channel: WorkerChannel, contract: EnvContract
) -> tuple[StepBuffers, SessionProgress, socket.socket]:
    own_end, worker_end = socket.socketpair()
    with contextlib.ExitStack() as failing, contextlib.ExitStack() as owned:
        failing.enter_context(own_end)
        owned.enter_context(worker_end)
        buffers = create_step_buffers(contract)
        owned.callback(os.close, buffers)
        progress = create_memory(SessionProgress.size_bytes(contract.num_envs))
        owned.callback(os.close, progress)
        try:
            socket.send_fds(channel.connection, [b"\0"], [buffers, progress, worker_end.fileno()])
        except OSError as error:
            message = "the environment's process died as soon as it had started"
            raise EnvStartError(message) from error
        shared = (
            StepBuffers(buffers, contract),
            SessionProgress.mapped(progress, contract.num_envs),
        )
        failing.pop_all()
        return *shared, own_end
