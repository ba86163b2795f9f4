"""What an endpoint, its worker and its clients take, for as long as one likes: does it grow?

``python -m tests.chaos.soak ADDRESS SECONDS NUM_STEPS SEED`` is a client: it steps until the time
is over, in sessions of so many steps, looks at each step itself, and prints what it did, as JSON.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from rlmesh_ray import RemoteVectorEnv
from tests.chaos.endpoint import Endpoint
from tests.chaos.hash_chain import NUM_ACTIONS, Position
from tests.chaos.history import History
from tests.chaos.scoreboard import Row
from tests.chaos.vector_client import LIMIT_S, NUM_LANES

_NUM_SAMPLES = 300
_WARM_UP = 0.3
"""What share of the samples is not looked at."""
_VISIT_STEPS = 2000
"""Of a session, for the client that comes and goes."""
_ALL_STEPS = 2**62
_LONG_S = 3000.0
_MOST_MB_PER_HOUR = 1.0
_MOST_KB_PER_SESSION = 0.5
_SLACK = 2
"""By so much may a number of descriptors or threads differ between two looks."""
_MB = 2.0**20


@dataclass
class Usage:
    """What a process takes, look by look."""

    name: str
    process: psutil.Process
    times_s: list[float] = field(default_factory=list)
    memory_bytes: list[int] = field(default_factory=list)
    """Its own: not what it shares with others."""
    num_descriptors: list[int] = field(default_factory=list)
    num_threads: list[int] = field(default_factory=list)

    def look(self) -> None:
        """Note what it takes now."""
        self.times_s.append(time.monotonic())
        self.memory_bytes.append(self.process.memory_full_info().uss)
        self.num_descriptors.append(self.process.num_fds())
        self.num_threads.append(self.process.num_threads())

    def per_hour(self, numbers: Sequence[int]) -> float:
        """Return by how much numbers of this grow, after the warm-up."""
        first = int(len(numbers) * _WARM_UP)
        slope, _ = np.polyfit(np.array(self.times_s[first:]) / 3600, numbers[first:], 1)
        return float(slope)

    def problems(self, num_sessions_per_hour: float) -> list[str]:
        """Return what grows that should not; in a short time, memory proves nothing."""
        allowed = max(_MOST_MB_PER_HOUR, num_sessions_per_hour * _MOST_KB_PER_SESSION / 1024)
        memory, is_long = self.per_hour(self.memory_bytes) / _MB, self._duration_s >= _LONG_S
        found = [f"memory grows by {memory:.2f} MB/h"] if is_long and memory > allowed else []
        for what, numbers in (
            ("descriptors", self.num_descriptors),
            ("threads", self.num_threads),
        ):
            looked_at = numbers[int(len(numbers) * _WARM_UP) :]
            half = len(looked_at) // 2
            before, after = np.median(looked_at[:half]), np.median(looked_at[half:])
            if after - before > _SLACK:
                found.append(f"from {before:g} to {after:g} {what}")
        return [f"{self.name}: {problem}" for problem in found]

    @property
    def _duration_s(self) -> float:
        return self.times_s[-1] - self.times_s[0]

    def summary(self) -> str:
        """Return the slopes in a few words."""
        memory = self.per_hour(self.memory_bytes) / _MB
        descriptors, threads = map(self.per_hour, (self.num_descriptors, self.num_threads))
        return (
            f"{self.name} {memory:+.2f} MB/h at {self.memory_bytes[-1] / _MB:.0f} MB, "
            f"{descriptors:+.1f} descriptors/h at {self.num_descriptors[-1]}, "
            f"{threads:+.1f} threads/h at {self.num_threads[-1]}"
        )


def soak(row: Row, num_minutes: int, history: History, seed: int) -> list[float]:
    """Have one client step in one session, and one in session after session."""
    duration_s = 60.0 * num_minutes
    endpoint = Endpoint(
        "tests.chaos.hash_chain:HashChain", num_envs=NUM_LANES, transport=row.transport
    )
    try:
        steady = _client(endpoint, duration_s, _ALL_STEPS, seed)
        (worker,) = endpoint.workers()  # its first client gets the one that there is
        visiting = _client(endpoint, duration_s, _VISIT_STEPS, seed + 1)
        pids = {
            "endpoint": endpoint.pid,
            "worker": worker,
            "client": steady.pid,
            "client of many sessions": visiting.pid,
        }
        usages = [Usage(name, psutil.Process(pid)) for name, pid in pids.items()]
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s - duration_s / _NUM_SAMPLES:
            for usage in usages:
                usage.look()
            threading.Event().wait(duration_s / _NUM_SAMPLES)
        reported = [
            json.loads(client.communicate(timeout=LIMIT_S)[0]) for client in (steady, visiting)
        ]
    finally:
        endpoint.stop()
    num_sessions = sum(each["num_sessions"] for each in reported)
    for problem in (problem for each in reported for problem in each["problems"]):
        history.wrong(problem)
    for usage in usages:
        for problem in usage.problems(num_sessions / duration_s * 3600):
            history.wrong(problem)
        history.note(usage.summary())
    num_steps = sum(each["num_steps"] for each in reported)
    for _ in range(num_minutes):
        history.fault(row.fault)
    history.note(f"{num_steps} steps in {num_sessions} sessions")
    return []


def _client(
    endpoint: Endpoint, duration_s: float, num_steps: int, seed: int
) -> "subprocess.Popen[str]":
    arguments = [endpoint.address, str(duration_s), str(num_steps), str(seed)]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.soak", *arguments], stdout=subprocess.PIPE, text=True
    )


class Stepper:
    """Steps hash chains and looks at each step; keeps nothing that grows."""

    def __init__(self, seed: int) -> None:
        self._actions = np.random.default_rng(seed)
        self.num_steps = self.num_sessions = 0
        self.problems: list[str] = []

    def visit(self, address: str, num_steps: int, end_s: float) -> None:
        """Step in a session of its own."""
        env = RemoteVectorEnv(address)
        self.num_sessions += 1
        places: list[Position | None] = [Position.read(each) for each in env.reset()[0]]
        for _ in range(num_steps):
            actions = self._actions.integers(NUM_ACTIONS, size=NUM_LANES)
            observations, _, terminated, truncated, _ = env.step(actions)
            for lane, observation in enumerate(observations):
                seen, before = Position.read(observation), places[lane]
                if before is not None and seen != before.after(int(actions[lane])):
                    self.problems.append(f"from {before} to {seen} by {actions[lane]}")
                places[lane] = None if terminated[lane] or truncated[lane] else seen
            self.num_steps += NUM_LANES
            if time.monotonic() > end_s:
                break
        env.close()


def main(arguments: Sequence[str]) -> None:
    """Be a client."""
    address, duration_s, num_steps, seed = arguments
    stepper, end_s = Stepper(int(seed)), time.monotonic() + float(duration_s)
    while time.monotonic() < end_s:
        stepper.visit(address, int(num_steps), end_s)
    reported: dict[str, Any] = {
        "num_steps": stepper.num_steps,
        "num_sessions": stepper.num_sessions,
        "problems": stepper.problems[:20],
    }
    sys.stdout.write(json.dumps(reported))


if __name__ == "__main__":
    main(sys.argv[1:])
