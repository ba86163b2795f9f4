"""Which machine was measured: a figure without it says nothing."""

import os
import platform
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("rlmesh-ray", "grpcio", "protobuf", "numpy", "torch", "ray", "uvloop")


@dataclass(frozen=True, slots=True)
class Machine:
    """What the figures depend on."""

    cpu: str
    cores: int
    """That this process may use."""
    system: str
    python: str
    packages: dict[str, str]
    """Name and version of what is installed."""
    load_average: float | None
    """Of the last minute, before anything was measured; None where the system tells none."""


def describe() -> Machine:
    """Return what is known about this machine."""
    return Machine(
        cpu=_cpu(),
        cores=len(usable_cores()) or os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        load_average=_load(),
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Processor time, at one moment."""

    now_s: float
    process_s: float
    """Of one process so far."""
    all_s: float
    """Of everything so far; on a virtual machine, what its host gave to others is in it."""


def work_of(pid: int) -> Work | None:
    """Return what a process and the whole machine have worked; None where nothing tells it.

    It is read from outside: a process that is asked would answer when it has time.
    """
    machine, process = Path("/proc/stat"), Path(f"/proc/{pid}/stat")
    if not (machine.exists() and process.exists()):
        return None
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    # The second field is a name in brackets, and may hold anything.
    of_process = process.read_text().rpartition(")")[2].split()
    user, nice, system, _idle, _waiting, *rest = machine.read_text().split("\n", 1)[0].split()[1:9]
    return Work(
        now_s=time.perf_counter(),
        process_s=sum(map(int, of_process[11:13])) / ticks_per_s,
        all_s=sum(map(int, (user, nice, system, *rest))) / ticks_per_s,
    )


def _cpu() -> str:
    """Return the model's name; ``platform`` knows it on some systems only."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine() or "unknown"


def usable_cores() -> list[int]:
    """Return the cores that this process may use; empty where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
