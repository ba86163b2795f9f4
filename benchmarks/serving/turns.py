"""Clients that ask several servers by turns.

The speed of a shared machine changes by half from one second to the next: so all servers run at
once, and each is asked for a quarter of a second, the next one right after it.

A client reads a line with the servers, their frames and whether its routes share a stream, and
writes what ``opened`` the routes. For each line that follows it asks a server for some seconds, and
writes the ``seconds`` that this took and its ``latencies_us``. After a last line, ``null``, it
writes all ``answers``, which are checked here. Frames travel in base64.
"""

import base64
import json
from collections.abc import Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.machine import Work, work_of
from benchmarks.processes import Process, Reading, received
from benchmarks.record import by_turns
from benchmarks.serving.frames import Dialect
from rlmesh_ray.errors import CodecError, EndpointError, RemoteModelError

_TURN_S = 0.25


@dataclass(frozen=True, slots=True)
class AskedServer:
    """A server that the clients ask."""

    address: str
    pid: int
    dialect: Dialect


@dataclass(frozen=True, slots=True)
class TurnsJob:
    """The work of one client process."""

    command: Sequence[str]
    routes: Sequence[str]
    """At each of the servers; names of the form that ``turns_client`` finds in answers."""
    rows: int
    """In each request."""
    is_one_stream: bool
    """Whether the routes share a Join stream; else each has its own."""

    def to_line(self, servers: Iterable[AskedServer]) -> str:
        """Return the first line that the client reads."""
        described = [
            {
                "address": asked.address,
                "openings": {
                    route: _encoded(asked.dialect.opening(route, self.rows))
                    for route in self.routes
                },
                "requests": {
                    route: _encoded(asked.dialect.request(route, self.rows, route))
                    for route in self.routes
                },
            }
            for asked in servers
        ]
        return json.dumps({"servers": described, "is_one_stream": self.is_one_stream})


def ask_by_turns(
    servers: Sequence[AskedServer],
    jobs: Sequence[TurnsJob],
    *,
    warm_up_s: float,
    seconds: float,
    cores: Collection[int] | None = None,
) -> list[Reading]:
    """Let clients ask each of ``servers`` for some seconds, by turns; return a reading of each.

    Args:
        servers: They do nothing else meanwhile.
        jobs: Of client processes, which ask a server all at once.
        warm_up_s: Work at each server before the measurement, which is not counted.
        seconds: Of the measurement of each server.
        cores: Of all clients, as of ``Process``.

    Raises:
        EndpointError: A client failed, or an answer was no prediction; there are no numbers then.
    """
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Process("a client", job.command, cores=cores)) for job in jobs
        ]
        for client, job in zip(clients, jobs, strict=True):
            client.send(job.to_line(servers))
        for client in clients:
            for asked, answers in zip(servers, received(client)["opened"], strict=True):
                _check_opened(asked.dialect, answers)
        accounts = [_Account(asked.pid, clients) for asked in servers]
        _alternate(accounts, warm_up_s)
        for account in accounts:
            account.forget()
        _alternate(accounts, seconds)
        for client in clients:
            client.send("null")
        for client in clients:
            for asked, answers in zip(servers, received(client)["answers"], strict=True):
                _check_predicted(asked.dialect, answers)
        return [account.reading() for account in accounts]


def _alternate(accounts: Sequence["_Account"], seconds: float) -> None:
    num_turns = max(1, round(seconds / _TURN_S))
    for turn in range(num_turns):
        for index, account in by_turns(list(enumerate(accounts)), turn):
            account.take_turn(index, seconds / num_turns)


@dataclass(slots=True)
class _Account:
    """What the turns at one server have brought."""

    server_pid: int
    clients: Sequence[Process]
    _latencies_us: list[int] = field(default_factory=list)
    _answers_per_s: float = 0.0  # times the number of turns
    _turns_s: list[float] = field(default_factory=list)
    _work: list[tuple[Work, Work]] = field(default_factory=list)
    _is_work_known: bool = True

    def take_turn(self, index: int, seconds: float) -> None:
        """Let all clients ask the server for some seconds.

        Args:
            index: Of the server, in the list that the clients have.
            seconds: Of the turn.
        """
        groups = [[self.server_pid], *([client.pid] for client in self.clients)]
        before = work_of(groups)
        for client in self.clients:
            client.send(json.dumps({"server": index, "seconds": seconds}))
        results = [received(client, seconds) for client in self.clients]
        after = work_of(groups)
        if before is None or after is None:
            self._is_work_known = False
        else:
            self._work.append((before, after))
        for result in results:
            self._latencies_us += result["latencies_us"]
        self._answers_per_s += sum(
            len(result["latencies_us"]) / result["seconds"] for result in results
        )
        self._turns_s.append(max(result["seconds"] for result in results))

    def forget(self) -> None:
        """Let the measurement begin: the turns before were the warm-up."""
        self._latencies_us.clear()
        self._turns_s.clear()
        self._work.clear()
        self._answers_per_s = 0.0

    def reading(self) -> Reading:
        """Return what all turns together have brought."""
        servers, clients, others = self._busy_cores()
        return Reading(
            answers_per_s=self._answers_per_s / len(self._turns_s),
            latencies_us=tuple(self._latencies_us),
            lags_us=(),
            server_cores=servers,
            client_cores=clients,
            other_cores=others,
        )

    def _busy_cores(self) -> tuple[float | None, tuple[float, ...], float | None]:
        if not self._is_work_known:
            return None, (), None
        # A server has nothing to do between its turns: all that it worked belongs to their time.
        turns_s = sum(self._turns_s)
        worked_s = [
            sum(after.groups_s[group] - before.groups_s[group] for before, after in self._work)
            for group in range(1 + len(self.clients))
        ]
        all_s = sum(after.all_s - before.all_s for before, after in self._work)
        watched_s = sum(after.now_s - before.now_s for before, after in self._work)
        server, *clients = (each_s / turns_s for each_s in worked_s)
        return server, tuple(clients), max(0.0, (all_s - sum(worked_s)) / watched_s)


def _check_opened(dialect: Dialect, answers: Iterable[str]) -> None:
    try:
        for answer in answers:
            dialect.check_opened(base64.b64decode(answer))
    except (CodecError, RemoteModelError) as error:
        raise EndpointError(f"nothing was measured: a route was refused: {error}") from error


def _check_predicted(dialect: Dialect, answers: Iterable[str]) -> None:
    try:
        for answer in answers:
            dialect.answered(base64.b64decode(answer))
    except (CodecError, RemoteModelError) as error:
        raise EndpointError(f"nothing was measured: a Predict was answered with {error}") from error


def _encoded(frame: bytes) -> str:
    return base64.b64encode(frame).decode()
