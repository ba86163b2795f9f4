"""The processes that are measured, from the side that starts them."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rlmesh_ray.bench.load import Harvest, Load
from rlmesh_ray.bench.machine import work_of
from rlmesh_ray.errors import EndpointError

_PATIENCE_S = 60.0
"""How long a process may take beyond the time that it was given."""

CLIENT = (sys.executable, "-m", "rlmesh_ray.bench.raw_client")


class Process:
    """A child that speaks JSON lines, as ``control`` has it. Usable as a context manager.

    Args:
        name: For messages.
        command: To run.
        cores: The only ones that it may use; None for all. Linux only.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, cores: Collection[int] | None = None
    ) -> None:
        self._name = name
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
        )
        if cores is not None and sys.platform == "linux":
            # Threads that it starts later inherit this.
            os.sched_setaffinity(self._process.pid, cores)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def tell(self, line: str = "") -> None:
        """Send a line.

        Raises:
            EndpointError: The process has ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise EndpointError(self._obituary()) from error

    def hear(self, within_s: float = 0.0) -> dict[str, Any]:
        """Return the next line.

        Args:
            within_s: How long the process works before it says anything; it gets more than that.

        Raises:
            EndpointError: It has ended, or took too long and was killed.
        """
        assert self._process.stdout is not None
        watchdog = threading.Timer(within_s + _PATIENCE_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line.startswith("{"):
            raise EndpointError(self._obituary() if not line else f"{self._name} says: {line!r}")
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        """End it. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._complaints):
            if pipe is not None:
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _obituary(self) -> str:
        code = self._process.wait()
        self._complaints.seek(0)
        last = (self._complaints.read().strip().splitlines() or ["nothing on standard error"])[-1]
        return f"{self._name} ended early with code {code}: {last}"


@dataclass(frozen=True, slots=True)
class Reading:
    """One measurement: all clients of one server together."""

    answers_per_s: float
    latencies_us: tuple[int, ...]
    lags_us: tuple[int, ...]
    server_cores: float | None
    """How many cores the server kept busy; None where the system does not tell."""
    client_cores: tuple[float, ...]
    """How many cores each client process kept busy; a client at 1 is the limit itself."""
    other_cores: float | None
    """How many cores were busy with anything else; likewise."""


class Server(Process):
    """A server under test, listening.

    Args:
        name: For messages.
        command: Of the server.
        cores: As of ``Process``.

    Raises:
        EndpointError: It could not be started.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, cores: Collection[int] | None = None
    ) -> None:
        super().__init__(name, command, cores=cores)
        try:
            self.port: int = self.hear()["port"]
        except BaseException:
            self.close()
            raise


def measure(
    server_pid: int, loads: Sequence[Load], *, cores: Collection[int] | None = None
) -> Reading:
    """Put ``loads`` on a server at once, each from a process of its own.

    Args:
        server_pid: Of the server's process.
        loads: Of equal durations.
        cores: Of all clients, as of ``Process``.

    Raises:
        EndpointError: A client failed, or got anything but a prediction; there is no number then.
    """
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Process("a client", CLIENT, cores=cores)) for _ in range(len(loads))
        ]
        for client, load in zip(clients, loads, strict=True):
            client.tell(load.to_line())
        for client in clients:
            _heard(client)
        for client in clients:
            client.tell()
        for client, load in zip(clients, loads, strict=True):
            _heard(client, load.warm_up_s)
        before = work_of(server_pid)
        told = [_heard(client, load.seconds) for client, load in zip(clients, loads, strict=True)]
        after = work_of(server_pid)
    harvests = [Harvest(**each) for each in told]
    client_cores = tuple(each.cpu_s / each.seconds for each in harvests)
    server_cores = other_cores = None
    if before is not None and after is not None:
        seconds = after.now_s - before.now_s
        server_cores = (after.process_s - before.process_s) / seconds
        all_cores = (after.all_s - before.all_s) / seconds
        other_cores = max(0.0, all_cores - server_cores - sum(client_cores))
    return Reading(
        answers_per_s=sum(each.answers / each.seconds for each in harvests),
        latencies_us=tuple(value for each in harvests for value in each.latencies_us),
        lags_us=tuple(value for each in harvests for value in each.lags_us),
        server_cores=server_cores,
        client_cores=client_cores,
        other_cores=other_cores,
    )


def _heard(client: Process, within_s: float = 0.0) -> dict[str, Any]:
    told = client.hear(within_s)
    if "error" in told:
        raise EndpointError(f"nothing was measured: {told['error']}")
    return told
