"""The machine that was measured: figures of two machines do not compare."""

import contextlib
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

_PACKAGES = ("rlmesh-ray", "grpcio", "protobuf", "numpy", "gymnasium", "torch", "ray", "uvloop")


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
    """Of the last minute, before the measurements; None where the system does not report it."""
    date: str
    """When the measurements began, in UTC."""


def describe() -> Machine:
    """Return what is known about this machine."""
    return Machine(
        cpu=_cpu(),
        cores=len(usable_cores()) or os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        load_average=_load(),
        date=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    )


@dataclass(frozen=True, slots=True)
class Work:
    """Processor time, at one moment."""

    now_s: float
    groups_s: tuple[float, ...]
    """Of each group of processes so far, and of those that they have started."""
    all_s: float
    """Of everything so far."""


def work_of(groups: Sequence[Collection[int]]) -> Work | None:
    """Return what processes, with all that they have started, and the whole machine have worked.

    It is read from outside: a process that is asked would answer when it has time.

    Args:
        groups: Ids of processes; none of a group started another one of it.

    Returns:
        None where the system does not report it, or where one of the processes is gone.
    """
    stats, times = _stats(), machine_times()
    if times is None or not {pid for group in groups for pid in group} <= set(stats):
        return None
    ticks_per_s = _ticks_per_s()
    return Work(
        now_s=times.now_s,
        groups_s=tuple(
            sum(sum(map(int, stats[pid][11:13])) for pid in _families(group, stats)) / ticks_per_s
            for group in groups
        ),
        all_s=times.busy_s,
    )


class MachineTimes(NamedTuple):
    """Processor time of the whole machine, at one moment."""

    now_s: float
    busy_s: float
    stolen_s: float


def machine_times() -> MachineTimes | None:
    """Return the processor time of everything so far, and the steal time; see ``proc_stat(5)``."""
    machine = Path("/proc/stat")
    if not machine.exists():
        return None
    ticks = map(int, machine.read_text().split("\n", 1)[0].split()[1:9])
    user, nice, system, _idle, _waiting, interrupts, soft_interrupts, steal = ticks
    busy = user + nice + system + interrupts + soft_interrupts
    return MachineTimes(time.perf_counter(), busy / _ticks_per_s(), steal / _ticks_per_s())


class StealClock:
    """The steal time from now on: what a virtual machine's host gave to its other guests.

    Args:
        read: Returns the present times; None where the system does not report them.
    """

    def __init__(self, read: Callable[[], MachineTimes | None] = machine_times) -> None:
        self._read, self._before = read, read()

    def percent_of_a_core(self) -> float | None:
        """Return it so far, as part of the time that has passed; None where it is not reported."""
        before, now = self._before, self._read()
        if before is None or now is None:
            return None
        return round(100 * (now.stolen_s - before.stolen_s) / (now.now_s - before.now_s), 1)


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, list[str]]:
    """Return the fields of every process, by its id, from its state on."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # One may end at any moment.
        with contextlib.suppress(OSError):
            # The second field is a name in brackets, and may hold anything.
            found[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    return found


def _families(pids: Collection[int], stats: Mapping[int, Sequence[str]]) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[1]), []).append(pid)
    found: set[int] = set()
    new = list(pids)
    while new:
        found.update(new)
        new = [child for pid in new for child in children.get(pid, []) if child not in found]
    return found


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
    """Return the cores that this process may use; empty where the system does not report them."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
