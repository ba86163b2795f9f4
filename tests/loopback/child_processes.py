"""What processes a process has started."""

import psutil


def child_pids(parent: int | None = None) -> set[int]:
    """Return the processes that a process has started, this one by default."""
    # Not by its threads' lists of children: those of a thread that ends just now are in none.
    return {child.pid for child in psutil.Process(parent).children()}


def worker_pids(parent: int | None = None) -> set[int]:
    """Return the worker processes of a process, this one by default."""
    return {pid for pid in child_pids(parent) if "rlmesh_ray.envs.worker" in _command(pid)}


def _command(pid: int) -> list[str]:
    """Return the command line of a process, empty when it has just ended."""
    try:
        return psutil.Process(pid).cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []
