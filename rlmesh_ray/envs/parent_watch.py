"""A worker must not outlive its endpoint, whatever its environment is doing.

The lifeline is a pipe that the endpoint holds open and nobody writes to. When the endpoint
dies, however it dies, the pipe ends; so does the worker then, with all processes that its
environment has started (the worker leads a process group of its own).
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
        descriptor: Reading end of the lifeline.
        parent_pid: Who holds the other end.
    """
    if sys.platform == "linux":
        # The kernel itself kills: that works even while native code holds the interpreter lock.
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    watchdog = threading.Thread(
        target=_watch, args=(descriptor, parent_pid), name="lifeline", daemon=True
    )
    watchdog.start()


def _watch(descriptor: int, parent_pid: int) -> None:
    # The pipe's end may have come before ``start``, and where the parent has forked it never
    # comes: the fork holds the pipe as well. Hence the look at the parent.
    pipe = select.poll()
    pipe.register(descriptor, select.POLLIN)
    while os.getppid() == parent_pid and not pipe.poll(_PARENT_CHECK_MS):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
