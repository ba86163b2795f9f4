"""What a client is told to do, and what it brings back; both travel as JSON."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Order:
    """A client process to start, and what to tell it."""

    command: Sequence[str]
    """Of a process that reads one line, says ``ready``, waits for a line, says ``begun`` when its
    warm-up is over, and in the end the fields of a ``Harvest``, or ``error``. If it has started
    others, it lives on until its standard input ends: their work is read after the harvest."""
    line: str
    """That it reads."""
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
    """Open loop: how many requests arrive a second, whatever the server does.
    None: closed loop, each route asks when it has its answer."""
    seed: int = 0
    """Of the arrivals."""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        told = json.loads(line)
        return cls(**{**told, "routes": tuple(told["routes"])})

    def order(self) -> Order:
        """Return the client that does it."""
        client = "closed_loop_client" if self.arrivals_per_s is None else "open_loop_client"
        command = [sys.executable, "-m", f"benchmarks.serving.{client}"]
        return Order(command, self.to_line(), self.warm_up_s, self.seconds)


@dataclass(frozen=True, slots=True)
class Harvest:
    """What one client process has measured."""

    answers: int
    """Predictions that arrived, or environment steps that were made, within the measurement."""
    seconds: float
    cpu_s: float
    """Processor time of the client."""
    latencies_us: tuple[int, ...]
    """From the sending (open loop: from the scheduled arrival) to the answer; of environments,
    what each vector step took. Empty where the client cannot tell."""
    lags_us: tuple[int, ...] = ()
    """Open loop: how much later than scheduled the client itself was ready to send."""
