"""The processes that are measured, from the side that starts them."""

import contextlib
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

from benchmarks.load import ClientJob, ClientResult
from benchmarks.machine import Work, work_of
from rlmesh_ray.errors import EndpointError

_GRACE_S = 10.0
"""How long a process may take to end."""
_PATIENCE_S = 60.0
"""How long a process may take beyond the time that it was given."""


class Process:
    """A child process that reads and writes JSON lines; see ``control``. A context manager.

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

    def send(self, line: str = "") -> None:
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

    def receive(self, within_s: float = 0.0) -> dict[str, Any]:
        """Return the next line.

        Args:
            within_s: How long the process works before it writes the line; it gets more than that.

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
            raise EndpointError(self._obituary() if not line else f"{self._name} writes: {line!r}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """Close its standard input, so that it cleans up and ends. Idempotent."""
        assert self._process.stdin is not None
        # The last line may not have reached it, if it has ended.
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._complaints):
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
    """One measurement: all clients together."""

    answers_per_s: float
    latencies_us: tuple[int, ...]
    lags_us: tuple[int, ...]
    server_cores: float | None
    """How many cores the servers kept busy; None where the system does not report it."""
    client_cores: tuple[float, ...]
    """How many cores each client process kept busy; a raw client at 1 is the limit itself."""
    other_cores: float | None
    """How many cores were busy with anything else; likewise."""


class Server(Process):
    """A server under test, listening.

    Args:
        name: For messages.
        command: Of the server.
        cores: As of ``Process``.
        loading_s: Seconds that the server may take to load what it serves; it gets more than that.

    Raises:
        EndpointError: It could not be started.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        cores: Collection[int] | None = None,
        loading_s: float = 0.0,
    ) -> None:
        super().__init__(name, command, cores=cores)
        try:
            self.address: str = self.receive(loading_s)["address"]
        except BaseException:
            self.close()
            raise

    @property
    def port(self) -> int:
        """Of its address on 127.0.0.1."""
        return int(self.address.rpartition(":")[2])


def measure(
    server_pids: Collection[int], jobs: Sequence[ClientJob], *, cores: Collection[int] | None = None
) -> Reading:
    """Put ``jobs`` on servers at once, each from a process of its own.

    Args:
        server_pids: Of the servers' processes; empty where the clients do all the work.
        jobs: Of equal durations.
        cores: Of all clients, as of ``Process``.

    Raises:
        EndpointError: A client failed, or got no answer that counts; there is no number then.
    """
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Process("a client", job.command, cores=cores)) for job in jobs
        ]
        for client, job in zip(clients, jobs, strict=True):
            client.send(job.line)
        for client in clients:
            received(client)
        for client in clients:
            client.send()
        for client, job in zip(clients, jobs, strict=True):
            received(client, job.warm_up_s)
        groups = [server_pids, *([client.pid] for client in clients)]
        before = work_of(groups)
        replies = [received(client, job.seconds) for client, job in zip(clients, jobs, strict=True)]
        after = work_of(groups)
    results = [ClientResult(**each) for each in replies]
    if before is None or after is None:
        servers, others = None, None
        own = tuple(each.cpu_s / each.seconds for each in results)
    else:
        (servers, *of_clients), others = busy(before, after)
        own = tuple(of_clients)
    return Reading(
        answers_per_s=sum(each.answers / each.seconds for each in results),
        latencies_us=tuple(value for each in results for value in each.latencies_us),
        lags_us=tuple(value for each in results for value in each.lags_us),
        server_cores=servers,
        client_cores=own,
        other_cores=others,
    )


def busy(before: Work, after: Work) -> tuple[list[float], float]:
    """Return how many cores each group of processes kept busy, and how many all other processes."""
    seconds = after.now_s - before.now_s
    cores = [
        (later - earlier) / seconds
        for earlier, later in zip(before.groups_s, after.groups_s, strict=True)
    ]
    return cores, max(0.0, (after.all_s - before.all_s) / seconds - sum(cores))


def received(client: Process, within_s: float = 0.0) -> dict[str, Any]:
    """Return the next line of a client.

    Args:
        client: A process that writes ``error`` where it has nothing to report.
        within_s: As of ``Process.receive``.

    Raises:
        EndpointError: It failed, or has written an error.
    """
    message = client.receive(within_s)
    if "error" in message:
        raise EndpointError(f"nothing was measured: {message['error']}")
    return message
