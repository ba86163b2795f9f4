"""Parent watch: kills a worker, with its process group, as soon as its endpoint dies.

The endpoint holds the writing end of a pipe and never writes. When it dies, the pipe ends, and the
kernel or a thread kills the worker's process group, with all processes of the environment.
"""

import fcntl
import os
import select
import signal
import sys
import threading

_PARENT_CHECK_MS = 1000


def start(descriptor: int, parent_pid: int) -> None:
    """Kill this process group as soon as the pipe ends or the parent is gone.

    Args:
        descriptor: Reading end of the pipe.
        parent_pid: Process id of the endpoint.
    """
    if sys.platform == "linux":
        # SIGIO as SIGKILL: the kernel kills even while native code holds the interpreter lock.
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    watchdog = threading.Thread(
        target=_watch, args=(descriptor, parent_pid), name="parent-watch", daemon=True
    )
    watchdog.start()


def _watch(descriptor: int, parent_pid: int) -> None:
    # The pipe may have ended before ``start``; and where the parent has forked it does not end,
    # since the fork holds it, too. So the parent's id is checked as well.
    pipe = select.poll()
    pipe.register(descriptor, select.POLLIN)
    while os.getppid() == parent_pid and not pipe.poll(_PARENT_CHECK_MS):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
