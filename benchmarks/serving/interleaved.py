"""The work of a client that asks several servers in turns."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Turns:
    """The work of one such client. Travels as JSON."""

    ports: tuple[int, ...]
    """Of the servers, on 127.0.0.1."""
    dialect: str
    """Theirs: a name in ``frames.DIALECTS``."""
    warm_up_s: float
    """Work with each of them before the measurement, which is not counted."""
    seconds: float
    """Of the measurement of each of them."""

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "ports": tuple(fields["ports"])})

    @property
    def duration_s(self) -> float:
        """Of all of it."""
        return len(self.ports) * (self.warm_up_s + self.seconds)

    @property
    def command(self) -> Sequence[str]:
        """Of a process that reads one line, and writes the fields of a ``Taken``, or ``error``."""
        return [sys.executable, "-m", "benchmarks.serving.interleaved_client"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What it has measured."""

    latencies_us: Sequence[Sequence[int]]
    """Of each server, in the order of the ports: from a request to its answer."""
    client_cores: float
    """How many cores the client kept busy."""
