"""WorkerProcess: the endpoint's handle on an env worker, and the process that it runs in.

It has no thread and no event loop: callers wait on its channel. One command at a time; another
thread may call ``kill`` meanwhile.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import Self

from rlmesh_ray.envs import worker_guard
from rlmesh_ray.envs.commands import Command, DirectReply, Outcome, Start, Started, StartFailed
from rlmesh_ray.envs.env_source import EnvSource
from rlmesh_ray.envs.worker_channel import WorkerChannel, command_frame, decode_reply, encode
from rlmesh_ray.errors import CodecError, ConfigurationError, EnvStartError
from rlmesh_ray.options import SHARED_MEMORY, TCP
from rlmesh_ray.protocol.env_session import Failure, FailureKind
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.validation import ValidationMode
from rlmesh_ray.transport.exactly_once import SessionProgress
from rlmesh_ray.transport.step_buffers import StepBuffers, create_memory, create_step_buffers

_REAP_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 10.0  # a process that is not reaped stays; busy machines took more than a second
_MAX_FAULT_LOG_BYTES = 32 * 1024
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
        """How many the worker receives."""
        self.transport = SHARED_MEMORY if to_send else TCP

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
        """Send ``hello`` and the client's descriptors without blocking; raises OSError."""
        buffers, *eventfds = self._to_send
        descriptors = [buffers, self._connection.fileno(), *eventfds]
        socket.send_fds(to, [hello], descriptors, socket.MSG_DONTWAIT)
        self._close_descriptors()

    def send(self, data: bytes) -> None:
        """Send bytes to a TCP client, before its first request; as ``send_descriptors``."""
        self._connection.send(data, socket.MSG_DONTWAIT)

    def disconnect(self) -> None:
        """Disconnect client and worker. Idempotent."""
        self._close_descriptors()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _close_descriptors(self) -> None:
        while self._to_send:
            os.close(self._to_send.pop())


class WorkerProcess:
    """A worker in a process below its guards; made by ``start``, ended by ``close`` or ``kill``.

    ``new`` and ``join`` make one that waits for its first message, and becomes a worker by
    ``start``; another thread may end it to abort the start.
    """

    contract: EnvContract
    steps_subsets: bool
    """Whether a StepCommand may name its lanes."""
    pid: int
    progress: SessionProgress
    """Of the session; readable after the worker's death, too."""
    buffers: StepBuffers
    """Actions are written before a StepCommand; observations, rewards and flags are valid from the
    reply to the next command."""

    def __init__(self, host: "_HostProcess", channel: WorkerChannel) -> None:
        self._host = host
        self.channel = channel
        """Its commands and replies; the descriptor is negative when the worker has ended."""
        # For those of direct connections; None: the environment does not exist yet.
        self._descriptors: socket.socket | None = None

    @classmethod
    def new(cls) -> Self:
        host = _HostProcess()
        try:
            channel = host.open_channel(1)
        except BaseException:
            host.kill(None)
            raise
        assert channel is not None, "it is the first"
        return cls(host, channel)

    def join(self, most_workers: int) -> Self | None:
        """Return another worker of the process; None: it is ending, or has ``most_workers``."""
        channel = self._host.open_channel(most_workers)
        return None if channel is None else type(self)(self._host, channel)

    @classmethod
    def start(
        cls, source: EnvSource, *, validation: ValidationMode, process: Self | None = None
    ) -> Self:
        """Start a worker; blocks until its environment exists.

        It is in ``process``, which is ended when the start fails; None: in a new one.

        Raises:
            EnvStartError: The environment could not be created.
            ConfigurationError: This platform cannot pass descriptors to a process.
        """
        if not hasattr(socket, "send_fds"):
            raise ConfigurationError(
                f"environments cannot be hosted on {sys.platform}, which cannot share memory by "
                "descriptor; use Linux, macOS or WSL"
            )
        worker = process or cls.new()
        try:
            worker._create(source, validation)
        except BaseException:
            worker.kill()
            raise
        return worker

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or is ending: it takes no further worker."""
        return self._host.is_over

    @property
    def is_stuck(self) -> bool:
        """Whether another worker of the process has not ended in time, and may hang."""
        return self._host.is_stuck

    def shares_process(self, other: Self) -> bool:
        return self._host is other._host

    def has_children(self) -> bool:
        """Return whether processes run that the environment has started; after ``close``."""
        return worker_guard.has_children(self.pid)

    def _create(self, source: EnvSource, validation: ValidationMode) -> None:
        search_path = tuple(map(str, sys.path))
        start = Start(source, validation, search_path, os.environ.get("PYTHONPATH"))
        try:
            self.channel.send(encode(start))
            answer: Started | StartFailed = self.channel.receive()
        except (EOFError, OSError) as error:
            status = self.end()
            raise EnvStartError(
                f"cannot create {source.description}: its process {status}; see its output on "
                "standard error",
                self._host.fault_log,
            ) from error
        except CodecError as error:
            message = f"cannot create {source.description}: {_UNREADABLE}: {error}"
            raise EnvStartError(message) from error
        if isinstance(answer, StartFailed):
            self.end()  # not with a grace of 0: it may host the worker of another session, too
            raise EnvStartError(answer.message, answer.traceback_text, answer.is_wrong_usage)
        self.contract, self.steps_subsets = answer.contract, answer.steps_subsets
        self.pid = answer.pid
        self._descriptors, worker_end = socket.socketpair()
        with worker_end, contextlib.ExitStack() as owned:
            buffers = create_step_buffers(self.contract)
            owned.callback(os.close, buffers)
            progress = create_memory(SessionProgress.size_bytes(self.contract.num_envs))
            owned.callback(os.close, progress)
            descriptors = [buffers, progress, worker_end.fileno()]
            try:
                socket.send_fds(self.channel.connection, [b"\0"], descriptors)
            except OSError as error:
                message = "the environment's process died as soon as it had started"
                raise EnvStartError(message) from error
            self.buffers = self._own_buffers = StepBuffers(buffers, self.contract)
            self.progress = SessionProgress.mapped(progress, self.contract.num_envs)

    @property
    def is_alive(self) -> bool:
        try:
            return bool(self.channel.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def submit(self, command: Command, number: int = 0) -> None:
        """Send as much as possible without blocking; ``channel.advance`` sends the rest.

        If the worker is gone, ``receive`` reports it. ``number`` is that of the request; 0: it is a
        command of the endpoint itself.
        """
        self.channel.queue_frame(command_frame(command, number))

    def open_direct_tcp(self, connection: socket.socket) -> DirectHandle:
        """Send a client's TCP connection to the worker; the returned handle owns it.

        An OpenDirectCommand has to follow.

        Raises:
            OSError: A resource is exhausted, or the worker is gone; the connection is closed.
        """
        direct = DirectHandle([], connection)
        self._send_descriptors(direct, [connection.fileno()], self._own_buffers)
        return direct

    def open_direct_shared_memory(self) -> DirectHandle:
        """Create a shared-memory connection and send the worker's end; see ``open_direct_tcp``."""
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
            direct_buffers = StepBuffers(buffers, self.contract)
            direct = DirectHandle([os.dup(buffers), *eventfds], own_end)
            given.pop_all()
            descriptors = [worker_end.fileno(), buffers, *eventfds]
            self._send_descriptors(direct, descriptors, direct_buffers)
        return direct

    def _send_descriptors(
        self, direct: DirectHandle, descriptors: list[int], buffers: StepBuffers
    ) -> None:
        assert self._descriptors is not None, "the environment exists"
        try:
            socket.send_fds(self._descriptors, [b"\0"], descriptors, socket.MSG_DONTWAIT)
        except BaseException:
            direct.disconnect()
            raise
        self._direct_buffers = buffers

    def receive(self) -> Outcome:
        """Return the reply to the last command; blocks.

        A Failure is of the kind CRASHED if the process has died, which is reaped, and RAISED if
        the reply does not decode.
        """
        try:
            reply: Outcome = self.channel.receive()
        except (EOFError, OSError):
            message = f"the environment's process {self.end()}"
            return Failure(FailureKind.CRASHED, message, self._host.fault_log)
        except CodecError as error:
            return Failure(FailureKind.RAISED, f"{_UNREADABLE}: {error}")
        if type(reply) is DirectReply:
            self.buffers = self._direct_buffers if reply.is_open else self._own_buffers
        return reply

    def kill(self, *, spares_others: bool = False) -> None:
        """Kill the process and those of its environment; blocks until they have ended."""
        self.end(0.0, spares_others=spares_others)

    def close(self, timeout_s: float) -> None:
        """Have the worker close its environment and end; kill it after ``timeout_s``.

        A process that it shares with other workers continues.
        """
        with contextlib.suppress(OSError):  # it has ended
            self.channel.connection.shutdown(socket.SHUT_WR)
        self.end(timeout_s, spares_others=True)

    def end(self, grace_s: float | None = None, *, spares_others: bool = False) -> str:
        """End the worker and release its resources; return how its process ended. Idempotent.

        The process ends with its last worker, and is killed, with all others, where this worker
        does not end in time.

        Args:
            grace_s: Time to end by itself; None: the time to reap a process that is already dead.
            spares_others: Whether a process with other workers continues, also where this one does
                not end in time. If it never does, the deadlines of the others find out.
        """
        if self._descriptors is not None:
            self._descriptors.close()
        if self.channel.connection.fileno() >= 0:
            self._host.end_worker(self.channel, grace_s, spares_others=spares_others)
            self.channel.close()
        return self._host.how_it_ended(self.channel)


class _HostProcess:
    """The process of one or several workers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.fault_log = ""
        self._channels: set[WorkerChannel] = set()  # of the workers that have not been ended
        self.is_over = False
        self.is_stuck = False
        self._ended_by: WorkerChannel | None = None
        self._control, worker_end = socket.socketpair()
        with worker_end, contextlib.ExitStack() as failing:
            failing.enter_context(self._control)
            self._fault_log_descriptor = _new_fault_log()
            failing.callback(os.close, self._fault_log_descriptor)
            descriptors = [worker_end.fileno(), self._fault_log_descriptor]
            arguments = map(str, (descriptors[0], os.getpid(), descriptors[1]))
            self._process = subprocess.Popen(
                # -u: output of environments is not buffered. -P: the working directory is not
                # on the import path, unless it is on the parent's.
                [sys.executable, "-u", "-P", "-m", "rlmesh_ray.envs.worker_guard", *arguments],
                stdin=subprocess.PIPE,
                stdout=2,
                pass_fds=descriptors,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
            )
            failing.pop_all()

    def open_channel(self, most_workers: int) -> WorkerChannel | None:
        with self._lock:
            if self.is_over or self.is_stuck or len(self._channels) >= most_workers:
                return None
            own_end, worker_end = socket.socketpair()
            # Where the process is gone already, the channel is at its end.
            with worker_end, contextlib.suppress(ConnectionError):
                socket.send_fds(self._control, [b"\0"], [worker_end.fileno()])
            channel = WorkerChannel(own_end, decode_reply)
            self._channels.add(channel)
        return channel

    def end_worker(
        self, channel: WorkerChannel, grace_s: float | None, *, spares_others: bool
    ) -> None:
        """Wait until a worker has ended, or kill the process; reap it if it has ended.

        The worker closes its end of ``channel`` when its environment is closed. For the rest see
        ``WorkerProcess.end``.
        """
        timeout_s = _REAP_TIMEOUT_S if grace_s is None else grace_s
        with self._lock:
            self._channels.discard(channel)
            is_last = self.is_over = self.is_over or not self._channels
        if is_last:
            self._control.close()  # a process without workers ends then
        else:
            has_ended = _hangs_up(channel.connection, timeout_s)
            if spares_others:
                # One that has not ended may hang; the start of another worker would, too.
                self.is_stuck = self.is_stuck or not has_ended
                return
            timeout_s = _REAP_TIMEOUT_S if grace_s is None else 0.0
            if has_ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(timeout_s)
                if self._process.returncode is None:
                    return  # it goes on with its other workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self.kill(channel)

    def kill(self, channel: WorkerChannel | None) -> None:
        """Kill and reap the process, once; release its resources.

        ``channel`` is that of the worker that is ended so; None: the process has no worker yet.
        """
        with self._lock:
            if self._fault_log_descriptor < 0:
                return
            self.is_over = True
            if self._process.returncode is None:
                self._ended_by = channel
            # On Linux it is the worker's guard, which kills all processes below it, and then ends
            # as the worker did. Elsewhere it is the worker, whose group is killed: only this class
            # reaps it, so that its id, which is also its group's, cannot belong to another process.
            if sys.platform == "linux":
                self._process.terminate()
            else:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_TIMEOUT_S)
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._control.close()
            descriptor, self._fault_log_descriptor = self._fault_log_descriptor, -1
            # pread leaves the file position alone, which both processes share.
            log = os.pread(descriptor, _MAX_FAULT_LOG_BYTES, 0)
            os.close(descriptor)
            self.fault_log = log.decode("utf-8", "replace").strip()

    def how_it_ended(self, channel: WorkerChannel) -> str:
        if not self.is_over:
            return "has closed the connection"
        how = _how_it_ended(self._process.returncode)
        if self._ended_by in (None, channel):
            return how
        return f"{how}, together with another session's environment (sessions_per_worker)"


def _new_fault_log() -> int:
    """Return a descriptor for the stacks that faulthandler writes when a signal kills the worker.

    Both processes have this memory open: nothing is read while the worker lives, no file is left.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rlmesh-ray-fault-log", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _hangs_up(connection: socket.socket, timeout_s: float) -> bool:
    """Return whether the other end is closed within ``timeout_s``; reads nothing."""
    descriptor = connection.fileno()
    if descriptor < 0:
        return True
    poller = select.poll()  # not select: it fails for descriptors above 1023
    poller.register(descriptor, 0)
    return bool(poller.poll(timeout_s * 1000))


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "was killed, but the kernel still holds it"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
