"""Trials: faults at random moments, while clients step hash chains; nothing may be lost or doubled.

``make chaos`` runs all rows, and ``ROWS='cut kill' SEED=7 make chaos`` some of them. Each row
writes what its client saw to ``runs/chaos/ROW.jsonl``, which a checker reads
(``history.check_file``). The exit status is 1 where it finds anything.
"""

import argparse
import contextlib
import datetime
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil

from rlmesh_ray import RemoteVectorEnv
from rlmesh_ray.errors import EndpointError, RemoteEnvError
from rlmesh_ray.transport.direct_client import DirectClient
from tests.chaos.hash_chain import NUM_ACTIONS
from tests.chaos.history import History, Verdict, check_file, shown
from tests.chaos.proxy import Proxy
from tests.loopback.eventually import eventually
from tests.loopback.ports import free_address

TIMEOUT_S = 2.0
"""Of the clients' steps."""
GRACE_S = 0.5
"""For how long a worker may go on after its deadline."""
LIMIT_S = 60.0
"""By then a client must have been answered again."""
NUM_LANES = 2
NUM_SESSIONS = 2
"""Of a runner."""
_NUM_STEPS = 16
"""Of a client, between two looks whether it is to stop."""
_LAST_LOOKS = 3
_PAUSE_S = 0.05
"""Of a client, where the endpoint does not answer."""


class Client(Protocol):
    """Who steps hash chains, and tells a history what it sees."""

    def advance(self) -> bool:
        """Take some steps, or reset what was lost; return whether that was answered."""

    def begin_anew(self) -> None:
        """Have the next ``advance`` reset all lanes; for any thread."""

    def close(self) -> None:
        """Leave the endpoint."""


class VectorClient:
    """A RemoteVectorEnv that is opened again where its session breaks.

    Args:
        address: Of the endpoint.
        history: Is told what is seen.
        shared_memory: See RemoteVectorEnv.
        seed: Of the actions.
    """

    def __init__(self, address: str, history: History, *, shared_memory: bool, seed: int) -> None:
        self._address, self._history = address, history
        self._shared_memory = shared_memory
        self._actions = np.random.default_rng(seed)
        self._env: RemoteVectorEnv | None = None
        self._running: set[int] = set()
        """Lanes with an episode."""
        self._must_reset = True

    def advance(self) -> bool:
        """Take some steps; after a failure, reset all lanes, of another session perhaps."""
        try:
            self._advance()
        except RemoteEnvError as error:
            self._lose(error)
            if not error.is_recoverable:
                self.close()
            return False
        except EndpointError as error:
            self._lose(error)
            self.close()
            threading.Event().wait(_PAUSE_S)
            return False
        return True

    def begin_anew(self) -> None:
        """Have the next ``advance`` reset all lanes."""
        self._must_reset = True

    def close(self) -> None:
        """End the session, if there is one."""
        if self._env is not None:
            self._env.close()
        self._env, self._must_reset = None, True

    def _advance(self) -> None:
        if self._env is None:
            self._env = RemoteVectorEnv(
                self._address,
                connect_timeout_s=LIMIT_S,
                step_timeout_s=TIMEOUT_S,
                transport="auto" if self._shared_memory else "grpc",
            )
        if self._must_reset:
            observations, _ = self._env.reset()
            self._must_reset = False
            for lane, observation in enumerate(observations):
                self._begin(lane, observation)
        for _ in range(_NUM_STEPS):
            self._step(self._env)

    def _step(self, env: RemoteVectorEnv) -> None:
        actions = self._actions.integers(NUM_ACTIONS, size=NUM_LANES)
        observations, rewards, terminated, truncated, _ = env.step(actions)
        for lane, observation in enumerate(observations):
            if lane not in self._running:  # it has reset itself
                self._begin(lane, observation)
                continue
            self._history.stepped(
                str(lane),
                actions[lane],
                observation,
                rewards[lane],
                terminated=terminated[lane],
                truncated=truncated[lane],
            )
            if terminated[lane] or truncated[lane]:
                self._running.discard(lane)

    def _begin(self, lane: int, observation: Any) -> None:
        self._history.began(str(lane), observation)
        self._running.add(lane)

    def _lose(self, error: Exception) -> None:
        for lane in sorted(self._running):
            self._history.lost(str(lane), str(error))
        self._running.clear()
        self._must_reset = True


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault, met by one kind of client over one road."""

    fault: str
    client: str
    shared_memory: bool
    num_trials: int
    """In a full run."""

    @property
    def name(self) -> str:
        """What it is called on the command line and in files."""
        road = "shared_memory" if self.shared_memory else "messages"
        return f"{self.fault}-{self.client}-{road}"


class Endpoint:
    """An EnvServer in a process of its own, which keeps its port.

    Args:
        env: What it serves.
        num_envs: Lanes of a session.
        shared_memory: Whether it offers that.
    """

    def __init__(self, env: str, num_envs: int, *, shared_memory: bool) -> None:
        self.address = free_address()
        program = f"""
            import threading
            from rlmesh_ray import EnvServer
            EnvServer(
                {env!r}, num_envs={num_envs}, address={self.address!r},
                step_grace_s={GRACE_S}, shared_memory={shared_memory},
            ).start()
            threading.Event().wait()
        """
        self._command = [sys.executable, "-c", textwrap.dedent(program)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # `stop` closes it
        self._process = self._started()
        if not eventually(lambda: self._listens() or self._process.poll() is not None, LIMIT_S):
            raise TimeoutError(f"the endpoint does not listen after {LIMIT_S:g} s")
        if self._process.returncode is not None:
            self._log.seek(0)
            raise RuntimeError(f"the endpoint has ended: {self._log.read().decode()}")

    @property
    def pid(self) -> int:
        """Of the endpoint's process."""
        return self._process.pid

    def workers(self) -> list[int]:
        """Return the ids of the processes that its environments run in."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [
                child.pid
                for child in psutil.Process(self.pid).children()
                if "rlmesh_ray.envs.worker" in child.cmdline()
            ]
        return []

    def kill(self) -> None:
        """Kill it, and start it again."""
        self._process.kill()
        self._process.wait()
        self._process = self._started()

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def _listens(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def _started(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self._command, stdout=self._log, stderr=self._log)


class OpenRoads:
    """The direct roads that clients of this process have open."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[DirectClient] = weakref.WeakSet()

    @contextmanager
    def watched(self) -> Iterator["OpenRoads"]:
        """Take notice of all that are opened meanwhile."""
        begin: Any = DirectClient.__init__

        def noting(road: DirectClient, *arguments: Any, **named: Any) -> None:
            begin(road, *arguments, **named)
            self._known.add(road)

        DirectClient.__init__ = noting  # type: ignore[method-assign,assignment]
        try:
            yield self
        finally:
            DirectClient.__init__ = begin  # type: ignore[method-assign]

    def are_open(self) -> bool:
        """Tell whether there is any."""
        return any(road.is_open for road in list(self._known))

    def cut(self) -> None:
        """Cut them all, as the endpoint does, whatever their clients are doing."""
        for road in list(self._known):
            road._worker.hang_up()


class Trials:
    """The trials of one row.

    Args:
        row: Which.
        history: Is told of the faults.
        seed: Of the moments.
    """

    def __init__(self, row: Row, history: History, seed: int) -> None:
        self._row, self._history = row, history
        self._random = random.Random(f"{seed}, {row.name}")
        self._stack = contextlib.ExitStack()
        self._num_advances = 0
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self.resumed_s: list[float] = []
        """How long it took, after each fault, until the client had been answered again."""
        self._roads = OpenRoads()
        has_agents = row.client.startswith("agents")
        self._endpoint = Endpoint(
            f"tests.chaos.hash_chain:{'Pair' if has_agents else 'HashChain'}",
            1 if has_agents else NUM_LANES,
            shared_memory=row.shared_memory,
        )
        self._proxy = Proxy(self._endpoint.address)
        self._inject: dict[str, Callable[[], None]] = {
            "cut_road": self._cut_road,
            "cut_join": self._proxy.cut,
            "kill_worker": lambda: self._signal(signal.SIGKILL, self._endpoint.workers()),
            "kill_endpoint": self._endpoint.kill,
            "freeze_worker": lambda: self._freeze(self._endpoint.workers()),
            "freeze_endpoint": lambda: self._freeze([self._endpoint.pid]),
        }

    def run(self, num_trials: int, make: Callable[[str], Client]) -> None:
        """Inject faults while a client steps.

        Args:
            num_trials: How many.
            make: Makes the client, given the address.

        Raises:
            BaseException: The client's, for what it should have survived.
        """
        with self._stack, self._roads.watched():
            self._stack.callback(self._endpoint.stop)
            self._stack.callback(self._proxy.close)
            client = make(self._proxy.address)
            thread = threading.Thread(target=self._drive, args=(client,))
            thread.start()
            try:
                for _ in range(num_trials):
                    self._try(client)
                self._see_answers(_LAST_LOOKS)
            finally:
                self._is_over.set()
                thread.join()
                client.close()

    def _try(self, client: Client) -> None:
        self._see_answers(1)
        if self._row.fault == "cut_road":
            client.begin_anew()  # brings another road
            self._wait(self._roads.are_open, "no direct road was opened")
        threading.Event().wait(self._random.uniform(0.0, 0.02))
        began_s = time.monotonic()
        self._inject[self._row.fault]()
        self._history.fault(self._row.fault)
        self._see_answers(1)
        self.resumed_s.append(time.monotonic() - began_s)

    def _drive(self, client: Client) -> None:
        try:
            while not self._is_over.is_set():
                self._num_advances += client.advance()
        except BaseException as error:  # noqa: BLE001  # the main thread raises it
            self._failure = error

    def _see_answers(self, count: int) -> None:
        """Wait until the client has come round so many times, beginning now."""
        wanted = self._num_advances + count + 1
        self._wait(lambda: self._num_advances >= wanted, "the client has stopped")

    def _wait(self, condition: Callable[[], bool], complaint: str) -> None:
        if not eventually(lambda: self._failure or condition(), LIMIT_S):
            raise TimeoutError(f"{self._row.name}: {complaint} for {LIMIT_S:g} s")
        if self._failure is not None:
            raise self._failure

    def _cut_road(self) -> None:
        self._roads.cut()

    def _freeze(self, pids: Sequence[int]) -> None:
        """Stop processes for up to twice the steps' timeout, or for a moment."""
        self._signal(signal.SIGSTOP, pids)
        longest_s = self._random.choice([0.1, 2 * TIMEOUT_S])
        threading.Event().wait(self._random.uniform(0.0, longest_s))
        self._signal(signal.SIGCONT, pids)

    def _signal(self, number: signal.Signals, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def run(row: Row, num_trials: int, seed: int, folder: Path) -> tuple[Verdict, list[float]]:
    """Run the trials of one row; return what the checker found, and how long clients waited."""
    path = folder / f"{row.name}.jsonl"
    history = History(path)
    trials = Trials(row, history, seed)
    try:
        trials.run(num_trials, lambda address: _client(row, address, history, seed))
    finally:
        history.close()
    return check_file(path), trials.resumed_s


def _client(row: Row, address: str, history: History, seed: int) -> Client:
    if row.client == "vector":
        return VectorClient(address, history, shared_memory=row.shared_memory, seed=seed)
    from tests.chaos.runners import RunnerClient  # brings Ray along

    kind, _, pace = row.client.partition("-")
    return RunnerClient(
        address,
        history,
        is_multi_agent=kind == "agents",
        lockstep=pace == "lockstep",
        num_sessions=NUM_SESSIONS,
        num_lanes=1 if kind == "agents" else NUM_LANES,
        timeout_s=TIMEOUT_S,
    )


CLIENTS = ("vector", "runner", "runner-lockstep", "agents", "agents-lockstep")
_NUM_TRIALS = {
    "cut_road": 260,
    "cut_join": 70,
    "kill_worker": 18,
    "kill_endpoint": 12,
    "freeze_worker": 4,
    "freeze_endpoint": 2,
}
"""By fault: in each row of a full run. In all: 2,000 cuts, 300 kills, 60 freezes."""
_HEAD = """# Trials of exactly-once

Faults at random moments, while a client steps environments whose observations prove what was done
to them: a step that is lost, done twice, answered with another one's answer, or stitched to another
episode is a violation. [Exactly once](exactly_once.md) says why there should be none.

{date}, `{command}`

| fault | client | road | trials | steps | episodes | cut short | violations | resumed, p95 s |
|---|---|---|---|---|---|---|---|---|
"""
ROWS = tuple(
    Row(fault, client, shared_memory, num_trials)
    for fault, num_trials in _NUM_TRIALS.items()
    for client in CLIENTS
    for shared_memory in ([True] if fault == "cut_road" else [True, False])
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run rows, write a scoreboard, return the exit status."""
    parser = argparse.ArgumentParser(description="Inject faults while clients step hash chains.")
    parser.add_argument("rows", nargs="*", help="Beginnings of rows' names; all rows.")
    parser.add_argument("--seed", type=int, default=1, help="Of the moments and actions.")
    parser.add_argument("--trials", type=int, help="Of each row; by default a full run's.")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="For histories.")
    parser.add_argument("--page", type=Path, help="A file for the scoreboard, in Markdown.")
    options = parser.parse_args(arguments)
    chosen = [row for row in ROWS if row.name.startswith(tuple(options.rows) or "")]
    if not chosen:
        parser.error(f"no row begins so; there are: {' '.join(row.name for row in ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    # Runners warn of each fault.
    logging.basicConfig(filename=options.out / "warnings.log", filemode="w")
    command = f"make chaos ROWS='{' '.join(options.rows)}' SEED={options.seed}"
    lines = [_HEAD.format(date=datetime.date.today(), command=command)]
    sys.stdout.write(lines[0])
    num_violations = 0
    for row in chosen:
        verdict, resumed_s = run(row, options.trials or row.num_trials, options.seed, options.out)
        num_violations += len(verdict.violations)
        lines.append(_line(row, verdict, resumed_s))
        sys.stdout.write(lines[-1])
        sys.stdout.write(shown(verdict.violations))
        sys.stdout.flush()
        if options.page is not None:
            options.page.write_text("".join(lines))
    return int(num_violations > 0)


def _line(row: Row, verdict: Verdict, resumed_s: Sequence[float]) -> str:
    road = "shared memory" if row.shared_memory else "messages"
    cells = (
        *(row.fault, row.client, road),
        *(verdict.num_faults, verdict.num_steps, verdict.num_episodes, verdict.num_lost),
        *(len(verdict.violations), f"{np.quantile(resumed_s, 0.95):.2f}"),
    )
    return f"| {' | '.join(map(str, cells))} |\n"


if __name__ == "__main__":
    sys.exit(main())
