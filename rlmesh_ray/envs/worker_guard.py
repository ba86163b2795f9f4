"""Guards of a worker: they end all processes below them as soon as the worker or the endpoint ends.

On Linux a worker process has two guards above it: endpoint, guard, guard, worker. They are forks
that have imported next to nothing, and they sleep.

Rule 1: each process below the worker becomes a child of a guard when its own parent ends, also a
daemon, and a process in its own session: guards are child subreapers.
Rule 2: a guard kills only its own children, round by round. Only it reaps them, so their
process ids cannot belong to other processes.
Rule 3: if one guard is killed, the other one ends the rest. Ray kills the children of an actor's
process when that ends.

Elsewhere a thread of the worker kills its process group when the endpoint has ended.
"""

import contextlib
import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

_PARENT_CHECK_S = 1.0
_OUTLIVES = b"\0rlmesh_ray.recording.writer_process\0"
"""In the command line of a process that writes what is recorded, and ends when it has done so."""
_NAME = b"rlmesh-guard"
_WAKING = (signal.SIGCHLD, signal.SIGIO, signal.SIGTERM)
# Of prctl.
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36


def start(parent_pid: int, descriptors: Sequence[int]) -> None:
    """End this process, and all that it starts, as soon as the endpoint has ended.

    Standard input is a pipe to which the endpoint never writes; nothing takes its place. On Linux
    this function returns in a fork, the worker, which alone keeps the ``descriptors``.
    """
    if sys.platform == "linux":
        _fork_below_guards(parent_pid, descriptors)
        os.close(_take_pipe())
    else:
        watched = (_take_pipe(), parent_pid)
        threading.Thread(target=_watch, args=watched, name="parent-watch", daemon=True).start()


def _take_pipe() -> int:
    """Move the pipe from standard input, which the environment may read."""
    descriptor = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return descriptor


def _watch(descriptor: int, parent_pid: int) -> None:
    while not _has_ended(descriptor, parent_pid, _PARENT_CHECK_S):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _has_ended(descriptor: int, parent_pid: int, timeout_s: float = 0.0) -> bool:
    """Return whether the parent is gone, or the pipe ends within ``timeout_s``.

    Where the parent has forked, the pipe does not end with it: the fork has it, too.
    """
    pipe = select.poll()
    pipe.register(descriptor, select.POLLIN)
    return os.getppid() != parent_pid or bool(pipe.poll(timeout_s * 1000))


def _fork_below_guards(parent_pid: int, descriptors: Sequence[int]) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)
    # A guard handles no signal: it waits for some, and SIGKILL alone ends it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp())  # both guards get SIGIO when the pipe ends
    fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
    for _ in range(2):
        prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        pid, child = os.getpid(), os.fork()
        if child:
            for descriptor in descriptors:
                os.close(descriptor)
            _guard(child, parent_pid)
        parent_pid = pid
    prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it had ended before
        os._exit(1)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _guard(child: int, parent_pid: int) -> NoReturn:
    """Wait for the end of ``child`` or of the endpoint; end what is left, and then as ``child``."""
    with open("/proc/self/comm", "wb") as name:
        name.write(_NAME)
    ended: dict[int, int] = {}
    while child not in ended and not _has_ended(0, parent_pid):
        woken_by = signal.sigtimedwait(_WAKING, _PARENT_CHECK_S)
        if woken_by is not None and woken_by.si_signo == signal.SIGTERM:
            break
        ended |= _reaped(os.WNOHANG)
    while [pid for pid in _children() if _is_killed(pid)]:
        ended |= _reaped(0)
    _end_like(os.waitstatus_to_exitcode(ended.get(child, signal.SIGKILL)))


def _reaped(options: int) -> dict[int, int]:
    """Reap children that have ended, and return their statuses.

    ``options`` is WNOHANG, or 0 to wait for at least one child.
    """
    statuses: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, options))[0]:
            statuses[child[0]] = child[1]
            options = os.WNOHANG
    return statuses


def _children() -> Iterator[int]:
    """Yield the ids of this process's children, also of those that are not reaped yet."""
    try:  # the list of all processes is long, and mostly there are none
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return
    yield from _children_of(os.getpid())


def _children_of(*parents: int) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        _, parent = _state_and_parent(int(name))
        if parent in parents:
            yield int(name)


def _state_and_parent(pid: int) -> tuple[bytes, int]:
    """Return a process's state, such as ``b"Z"``, and its parent's id; 0: it has just ended."""
    # The second field is a name in brackets, and may hold anything.
    state, parent, *_ = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split() or (b"", b"0")
    return state, int(parent)


def has_children(worker_pid: int) -> bool:
    """Return whether processes run that an environment has started; called by the endpoint.

    Those whose parent has ended are children of the worker's guard. Only Linux has guards:
    elsewhere, False.
    """
    if sys.platform != "linux":
        return False
    _, guard = _state_and_parent(worker_pid)
    children = (pid for pid in _children_of(worker_pid, guard) if guard and pid != worker_pid)
    return any(
        _OUTLIVES not in _read(f"/proc/{pid}/cmdline")
        and _state_and_parent(pid)[0] not in (b"", b"Z")  # it has ended
        for pid in children
    )


def _is_killed(pid: int) -> bool:
    """Kill a child, unless it ends by itself; return whether it will have to be reaped."""
    if _OUTLIVES in _read(f"/proc/{pid}/cmdline"):
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except PermissionError:  # its program is setuid
        return False
    return True


def _read(path: str) -> bytes:
    """Return the content of a file below /proc; empty: its process has just ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _end_like(code: int) -> NoReturn:
    """End with an exit code, or by the signal that a negative one stands for."""
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker has dumped its own
        with contextlib.suppress(OSError):  # SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(abs(code))


if __name__ == "__main__":
    _socket, _parent_pid, _fault_log = map(int, sys.argv[1:4])
    start(_parent_pid, (_socket, _fault_log))

    from rlmesh_ray.envs.worker import main

    main()
