"""Results of a benchmark: single measurements, and findings from all of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.statistics import Percentiles, Spread


@dataclass(frozen=True, slots=True)
class Measurement:
    """One number, from one repetition on one side."""

    workload: str
    case: str
    side: str
    repetition: int
    value: float
    unit: str
    latency_us: Percentiles | None
    """None where it is not measured."""
    lag_us: Percentiles | None
    """How late the client was itself, in the open loop."""
    server_cores: float | None
    """Busy, like the next two; None where the system does not report it."""
    client_cores: tuple[float, ...]
    """Of each client process."""
    other_cores: float | None
    """With anything else; likewise."""
    cpu_us: float | None = None
    """Of a rate or round trip: processor time of one step or message; see ``Spread``."""
    server_cpu_us: float | None = None
    """The servers' part of it."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What was aimed at."""

    text: str
    limit: float
    is_ceiling: bool = False
    """Whether the limit is the most that is allowed; else it is the least."""

    def is_met(self, value: float) -> bool:
        """Return whether ``value`` reaches it."""
        return value <= self.limit if self.is_ceiling else value >= self.limit


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    workload: str
    case: str
    unit: str
    sides: Mapping[str, Spread]
    """The first one is this package."""
    comparisons: Mapping[str, Spread] = field(default_factory=dict)
    """Name, such as ``"/ noop"``, and the ratio of each repetition."""
    goal: Goal | None = None
    judged: Spread | None = None
    """What the goal is about."""

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is reached, by the median; None without one."""
        if self.goal is None or self.judged is None:
            return None
        return self.goal.is_met(self.judged.median)

    def as_json(self) -> dict[str, object]:
        """Return it for a program."""
        return {
            "workload": self.workload,
            "case": self.case,
            "unit": self.unit,
            "sides": {name: spread.as_json() for name, spread in self.sides.items()},
            "comparisons": {name: each.as_json() for name, each in self.comparisons.items()},
            "goal": self.goal.text if self.goal else None,
            "is_met": self.is_met,
        }
