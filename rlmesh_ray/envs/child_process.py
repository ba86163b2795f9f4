"""ChildProcess: an env worker in a process, which may host the workers of several sessions."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Self

from rlmesh_ray.envs.worker_channel import WorkerChannel, decode_reply

_REAP_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 10.0  # a process that is not reaped stays; busy machines took more than a second
_MAX_FAULT_LOG_BYTES = 32 * 1024


class ChildProcess:
    """A worker in a process below its guards; made by ``start`` or ``join``."""

    def __init__(self, host: "_HostProcess", channel: WorkerChannel) -> None:
        self._host = host
        self._has_left = False
        self.channel = channel
        """Channel to the worker."""

    @classmethod
    def start(cls) -> Self:
        """Start a process with one worker, which waits for its first message."""
        host = _HostProcess()
        try:
            channel = host.open_channel(1)
        except BaseException:
            host.kill(None)
            raise
        assert channel is not None, "it is the first"
        return cls(host, channel)

    def join(self, most_workers: int) -> Self | None:
        """Return another worker of the same process; None: it is ending, or has no room.

        Args:
            most_workers: How many workers the process may host.
        """
        channel = self._host.open_channel(most_workers)
        return None if channel is None else type(self)(self._host, channel)

    @property
    def is_over(self) -> bool:
        """Whether the process has ended, or is ending: it takes no further worker."""
        return self._host.is_over

    @property
    def is_stuck(self) -> bool:
        """Whether another worker of the process has not ended in time, and may hang."""
        return self._host.is_stuck

    @property
    def fault_log(self) -> str:
        """Stacks of the process's threads if a signal such as SIGSEGV ended it; after ``end``."""
        return self._host.fault_log

    def end(self, grace_s: float | None = None, *, spares_others: bool = False) -> str:
        """End the worker and release its resources; return how its process ended. Idempotent.

        The process ends with its last worker, and is killed, with all others, where this worker
        does not end in time.

        Args:
            grace_s: Time to end by itself; None: the time to reap a process that is already dead.
            spares_others: Whether a process with other workers goes on, also where this one does
                not end in time. If it never does, the deadlines of the others find out.
        """
        if self.channel.connection.fileno() >= 0:
            with self._host.lock:
                has_left, self._has_left = self._has_left, True
            self._host.end_worker(
                self.channel, grace_s, is_counted=not has_left, spares_others=spares_others
            )
            self.channel.close()
        return self._host.how_it_ended(self.channel)


class _HostProcess:
    """The process of one or several workers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.fault_log = ""
        self._num_workers = 0
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
                env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
            )
            failing.pop_all()

    def open_channel(self, most_workers: int) -> WorkerChannel | None:
        """Return a channel to a new worker; None: the process is ending, or has no room."""
        with self.lock:
            if self.is_over or self.is_stuck or self._num_workers >= most_workers:
                return None
            own_end, worker_end = socket.socketpair()
            # Where the process is gone already, the channel is at its end.
            with worker_end, contextlib.suppress(ConnectionError):
                socket.send_fds(self._control, [b"\0"], [worker_end.fileno()])
            self._num_workers += 1
        return WorkerChannel(own_end, decode_reply)

    def end_worker(
        self,
        channel: WorkerChannel,
        grace_s: float | None,
        *,
        is_counted: bool,
        spares_others: bool,
    ) -> None:
        """Wait until a worker has ended, or kill the process; reap it if it has ended.

        Args:
            channel: The worker's channel, which the worker closes when its environment is closed.
            grace_s: See ``ChildProcess.end``.
            is_counted: Whether it is the first call for this worker.
            spares_others: See ``ChildProcess.end``.
        """
        timeout_s = _REAP_TIMEOUT_S if grace_s is None else grace_s
        with self.lock:
            self._num_workers -= is_counted
            is_last = self.is_over = self.is_over or not self._num_workers
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

        On Linux it is the worker's guard, which kills all processes below it, and then ends as the
        worker did. Elsewhere it is the worker, whose group is killed: only this class reaps it, so
        that its id, which is also its group's, cannot belong to another process.

        Args:
            channel: Of the worker that is ended so; None: the process has no worker yet.
        """
        with self.lock:
            if self._fault_log_descriptor < 0:
                return
            self.is_over = True
            if self._process.returncode is None:
                self._ended_by = channel
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

    It is anonymous memory that both processes have open: nothing has to be read while the worker
    lives, and no file is left afterwards.
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


def search_path() -> tuple[str, ...]:
    return tuple(str(entry) for entry in sys.path)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "was killed, but the kernel still holds it"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
