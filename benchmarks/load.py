"""The work of a client process and its results; both are sent as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class ClientJob:
    """A client process to start, and the line to send it."""

    command: Sequence[str]
    """Of a process that reads one line, writes ``ready``, waits for a line, writes ``begun`` when
    its warm-up is over, and in the end the fields of a ``ClientResult``, or ``error``. A process
    that has started further ones lives until its standard input ends: their processor time is read
    after its result."""
    line: str
    """The first line that it reads."""
    warm_up_s: float
    """Work before the measurement, which is not counted."""
    seconds: float
    """Of the measurement."""


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one raw client."""

    port: int
    """Of the server, on 127.0.0.1."""
    dialect: str
    """A name in ``frames.DIALECTS``."""
    routes: tuple[str, ...]
    """Names, unique over all clients of the server."""
    rows: int
    """In each request."""
    warm_up_s: float
    """Work before the measurement, which is not counted."""
    seconds: float
    """Of the measurement."""
    is_one_stream: bool = False
    """Closed loop: whether all routes share one Join stream; else each has its own."""
    connections: int = 1
    """Over which the streams are spread."""
    arrivals_per_s: float | None = None
    """Open loop: how many requests arrive a second, however slow the server is.
    None: closed loop, each route asks when it has its answer."""
    seed: int = 0
    """Of the arrivals."""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "routes": tuple(fields["routes"])})

    def job(self) -> ClientJob:
        """Return the client that does it."""
        client = "closed_loop_client" if self.arrivals_per_s is None else "open_loop_client"
        command = [sys.executable, "-m", f"benchmarks.serving.{client}"]
        return ClientJob(command, self.to_line(), self.warm_up_s, self.seconds)


@dataclass(frozen=True, slots=True)
class ClientResult:
    """What one client process has measured."""

    answers: int
    """Predictions that arrived, or environment steps that were made, within the measurement."""
    seconds: float
    cpu_s: float
    """Processor time of the client."""
    latencies_us: tuple[int, ...]
    """From the sending (open loop: from the scheduled arrival) to the answer; of environments,
    what each vector step took. Empty where the client does not measure it."""
    lags_us: tuple[int, ...] = ()
    """Open loop: how much later than scheduled the client itself was ready to send."""
