"""ChildProcess: starts, ends and reaps the process of an env worker."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Self

from rlmesh_ray.envs import fault_log
from rlmesh_ray.envs.compact_frames import decode_reply
from rlmesh_ray.envs.worker_channel import WorkerChannel

_REAP_TIMEOUT_S = 1.0
_KILL_TIMEOUT_S = 10.0  # a process that is not reaped stays; busy machines took more than a second


class ChildProcess:
    """A process that runs ``rlmesh_ray.envs.worker``; made by ``start``, ended by ``end``."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", channel: WorkerChannel, fault_log_descriptor: int
    ) -> None:
        self._process = process
        self.channel = channel
        """Channel to the process."""
        self._fault_log_descriptor = fault_log_descriptor
        self.fault_log = ""
        """Stacks of its threads if a signal such as SIGSEGV ended it; set by ``end``."""

    @classmethod
    def start(cls) -> Self:
        """Start the process; it waits for its first message."""
        own_end, worker_end = socket.socketpair()
        descriptor = fault_log.create()
        with worker_end:
            arguments = [str(worker_end.fileno()), str(os.getpid()), str(descriptor)]
            try:
                process = subprocess.Popen(
                    # -u: output of environments is not buffered. -P: the working directory is not
                    # on the import path, unless it is on the parent's.
                    [sys.executable, "-u", "-P", "-m", "rlmesh_ray.envs.worker", *arguments],
                    stdin=subprocess.PIPE,
                    stdout=2,
                    pass_fds=[worker_end.fileno(), descriptor],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())},
                )
            except BaseException:
                own_end.close()
                os.close(descriptor)
                raise
        return cls(process, WorkerChannel(own_end, decode_reply), descriptor)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def end(self, grace_s: float | None = None) -> str:
        """End the process and release its resources; return how it ended. Idempotent.

        Only this method reaps the process, so that its id, which is also its group's, cannot belong
        to another process when the group is killed.

        Args:
            grace_s: Time to end by itself; None: the time to reap a process that is already dead.
        """
        if self.channel.connection.fileno() >= 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_REAP_TIMEOUT_S if grace_s is None else grace_s)
            # The whole group, with all processes of the environment.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_TIMEOUT_S)
            if self._process.stdin is not None:
                self._process.stdin.close()
            self._read_fault_log()
            self.channel.close()
        return _how_it_ended(self._process.returncode)

    def _read_fault_log(self) -> None:
        descriptor, self._fault_log_descriptor = self._fault_log_descriptor, -1
        if descriptor >= 0:
            self.fault_log = fault_log.read(descriptor)
            os.close(descriptor)


def search_path() -> tuple[str, ...]:
    """Return the import path of this process."""
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
