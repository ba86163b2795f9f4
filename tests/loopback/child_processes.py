"""What processes a process has started."""

import contextlib
import os
import select
import time

import psutil

from rlmesh_ray.envs.worker_channel import WorkerChannel


def child_pids(parent: int | None = None) -> set[int]:
    """Return the processes that a process has started, this one by default."""
    # Not by its threads' lists of children: those of a thread that ends just now are in none.
    return {child.pid for child in psutil.Process(parent).children()}


def worker_pids(parent: int | None = None) -> set[int]:
    """Return the worker processes of a process, this one by default; they are below guards."""
    return {child.pid for child in psutil.Process(parent).children(recursive=True) if _works(child)}


def _works(process: psutil.Process) -> bool:
    """Return whether a process is a worker: no guard, and no fork of a worker."""
    with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess, ProcessLookupError):
        is_leader = os.getsid(process.pid) == process.pid
        is_guard = process.name() == "rlmesh-guard"
        return is_leader and not is_guard and "rlmesh_ray.envs.worker_guard" in process.cmdline()
    return False


def arrives(channel: WorkerChannel, timeout_s: float) -> bool:
    """Send and receive until a message or the end has arrived; return False after ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while not channel.advance():
        waiting = select.poll()
        events = select.POLLIN | (select.POLLOUT if channel.is_sending else 0)
        waiting.register(channel.connection, events)
        if not waiting.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
            return False
    return True
