"""What a vector step may grow with.

Standard library only: the command line needs it for its help.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType


class Axis(enum.StrEnum):
    """What grows; the rest stays as it is."""

    LANES = "lanes"
    """Of CartPole, with one endpoint."""
    ENDPOINTS = "endpoints"
    """Of 8 lanes of CartPole each; a step is done when the last one has answered."""
    OBSERVATION = "observation"
    """Bytes of each of 8 lanes' observations, which the environment copies."""


POINTS: Mapping[Axis, Sequence[int]] = MappingProxyType(
    {
        Axis.LANES: (1, 4, 16, 64, 256, 1024),
        Axis.ENDPOINTS: (1, 2, 4, 8, 16),
        Axis.OBSERVATION: (16, 256, 4_096, 65_536, 1_048_576),
    }
)
FEW_POINTS: Mapping[Axis, Sequence[int]] = MappingProxyType(
    {Axis.LANES: (1, 32, 1024), Axis.ENDPOINTS: (1, 4), Axis.OBSERVATION: (16, 4_096, 1_048_576)}
)


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """What is measured, where, how often and how long."""

    axes: Sequence[Axis] = tuple(Axis)
    is_sparse: bool = False
    """Whether ``FEW_POINTS`` are enough."""
    repetitions: int = 3
    warm_up_s: float = 0.5
    """Before each measurement; not counted."""
    seconds: float = 1.0
    """Of each measurement."""

    def points(self, axis: Axis) -> Sequence[int]:
        """Return where to measure."""
        return (FEW_POINTS if self.is_sparse else POINTS)[axis]


def case(axis: Axis, point: int) -> str:
    """Return a point's name, for tables and programs."""
    if axis is Axis.OBSERVATION:
        return f"{point:,} bytes"
    return f"{point:,} {axis if point > 1 else axis.removesuffix('s')}"
