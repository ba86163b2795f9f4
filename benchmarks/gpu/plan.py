"""Networks, workloads and settings of the subject ``gpu``.

Standard library only: the command line needs it for its help.
"""

import enum
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self


class Network(enum.StrEnum):
    """A network that is measured."""

    MLP = "mlp"
    """4-64-64-2, with rows of four float32."""
    CNN = "cnn"
    """A convolutional network of a million parameters, with rows of 84x84x4 uint8."""


class Workload(enum.StrEnum):
    """A part of the subject."""

    BATCHES = "batches"
    """Batches of 1 to 2048 rows: served, in the process itself, and in a plain loop of torch."""
    CLIENTS = "clients"
    """Many clients of one row each: the CPU beside the device."""


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """Settings of a measurement."""

    device: str = "cuda"
    """Torch's name of the device."""
    workloads: Sequence[Workload] = tuple(Workload)
    networks: Sequence[Network] = tuple(Network)
    rows: Sequence[int] = (1, 8, 32, 128, 512, 2048)
    """Sizes of the batches, ascending; the buckets, too."""
    clients: Sequence[int] = (1, 8, 64)
    """Numbers of clients."""
    client_processes: int = 1
    """Most processes over which the clients are spread."""
    compiles: bool = True
    """Whether compiled networks are measured, too."""
    torch_threads: int = 1
    """Threads of torch in each process that runs a network."""
    repetitions: int = 3
    warm_up_s: float = 0.2
    """Before each measurement; not counted."""
    seconds: float = 0.5
    """Of each measurement."""


@dataclass(frozen=True, slots=True)
class ServedNetwork:
    """A network and its options; the argument of ``model_server``, as JSON."""

    network: Network
    device: str
    buckets: Sequence[int] = ()
    compile: bool = False
    torch_threads: int = 1

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        return cls(**json.loads(line))


@dataclass(frozen=True, slots=True)
class BatchJob:
    """The work of ``batch_loop``, which reads it as JSON."""

    network: Network
    device: str
    rows: Sequence[int]
    """Sizes of the batches, ascending; the buckets, too."""
    compiles: bool
    torch_threads: int
    repetitions: int
    warm_up_s: float
    seconds: float

    def to_line(self) -> str:
        """Return it as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Return what ``to_line`` wrote."""
        return cls(**json.loads(line))
