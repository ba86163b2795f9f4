"""A warning if a learner in the driver's process would use more threads than there are idle cores.

torch divides its work evenly and waits for the slowest thread at every step: one thread without a
core of its own delays all of them. Ray gives actors as many threads as CPUs; in the driver's
process torch takes one for each core. On two idle cores that is a third faster than one thread;
beside other busy processes a small network was twelve times slower.
"""

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmesh_ray.rllib.config.tune_params import is_tune_param

_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_CPU_TIMES = Path("/proc/stat")
_LOOK_S = 0.25
_LOOKS = 4
"""How often to look: a process that is just starting is busy for a moment only."""


def thread_warnings(config: AlgorithmConfig) -> Iterator[str]:
    """Yield a sentence if torch has too many threads for a learner in this process.

    The number is not changed, since it is the whole process's. If there may be too many, this
    watches the machine for up to a second.
    """
    if is_tune_param(config, "num_learners", "num_gpus_per_learner"):
        return
    if config.num_learners or config.num_gpus_per_learner:
        return
    threads, cores = torch.get_num_threads(), num_cores()
    if not is_torch_default(threads, cores, os.environ):
        return
    sentence = excess_threads(threads, cores, idle_cores(cores, enough=threads))
    if sentence:
        yield sentence


def is_torch_default(threads: int, cores: int, environment: Mapping[str, str]) -> bool:
    """Return whether this many threads, more than one, are torch's default.

    That is one for each core, or one for two where the system lists each core twice.
    """
    if any(environment.get(name) for name in _VARIABLES):
        return False
    return threads > 1 and threads in {cores, cores // 2}


def excess_threads(threads: int, cores: int, idle: int) -> str | None:
    """Return a warning if there are more threads than idle cores; None: there are not.

    Args:
        threads: How many threads torch would use.
        cores: How many cores this process may use.
        idle: How many of them are idle now.
    """
    if threads <= max(idle, 1):
        return None
    return (
        f"torch learns in this process with {threads} threads, and {idle} of {cores} cores are "
        "idle: its threads would wait for each other, and training take several times as long; "
        f"call torch.set_num_threads({max(idle, 1)}) first, or start with OMP_NUM_THREADS="
        f"{max(idle, 1)}"
    )


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def idle_cores(cores: int, *, enough: int) -> int:
    """Return how many cores are idle: the largest number within a second.

    Args:
        cores: How many cores this process may use.
        enough: The number after which to stop looking.
    """
    if not _CPU_TIMES.exists():
        return max(cores - round(os.getloadavg()[0]), 0)
    most = 0
    before = _CPU_TIMES.read_text()
    for _ in range(_LOOKS):
        time.sleep(_LOOK_S)
        after = _CPU_TIMES.read_text()
        most = max(most, min(idle_between(before, after), cores))
        if most >= enough:
            break
        before = after
    return most


def idle_between(before: str, after: str) -> int:
    """Return how many cores were idle between two readings of ``/proc/stat``."""
    times = [[int(each) for each in text.splitlines()[0].split()[1:9]] for text in (before, after)]
    spent = [late - early for early, late in zip(*times, strict=True)]
    host_cores = sum(line.startswith("cpu") for line in after.splitlines()) - 1
    idle = spent[3] + spent[4]  # idle, and waiting for a disk
    return int(host_cores * idle / max(sum(spent), 1) + 0.5)
