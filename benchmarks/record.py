"""All measurements of one workload, and what is compared with what."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from benchmarks.findings import Measurement
from benchmarks.processes import Reading
from benchmarks.statistics import Spread, percentiles, ratio

T = TypeVar("T")

ROUND_TRIP = "us"
"""Unit of the round trips of requests."""

Note = Callable[[Measurement], None]
"""Gets every measurement when it is made."""


class Record:
    """The measurements of one workload.

    Args:
        workload: Its name.
        note: Gets each of them.
    """

    def __init__(self, workload: str, note: Note) -> None:
        self.workload = workload
        """Its name."""
        self._note = note
        self._all: list[Measurement] = []

    def add(  # where it belongs, what it is, and what else was read
        self, case: str, side: str, repetition: int, value: float, unit: str, reading: Reading
    ) -> None:
        """Take one in.

        Raises:
            ConfigurationError: Nothing was answered while it was measured.
        """
        per_s = _per_s(value, unit, reading)
        can_tell = reading.latencies_us or not reading.answers_per_s
        made = Measurement(
            workload=self.workload,
            case=case,
            side=str(side),
            repetition=repetition,
            value=value,
            unit=unit,
            latency_us=percentiles(reading.latencies_us) if can_tell else None,
            lag_us=percentiles(reading.lags_us) if reading.lags_us else None,
            server_cores=reading.server_cores,
            client_cores=reading.client_cores,
            other_cores=reading.other_cores,
            cpu_us=_cpu_us(per_s, reading.server_cores, *reading.client_cores),
            server_cpu_us=_cpu_us(per_s, reading.server_cores) if reading.client_cores else None,
        )
        self._all.append(made)
        self._note(made)

    def sides(self, case: str) -> dict[str, Spread]:
        """Return what each side did in a case; the values in the order of repetition."""
        found: dict[str, list[Measurement]] = {}
        for each in self._all:
            if each.case == case:
                found.setdefault(each.side, []).append(each)
        return {side: _spread(measured) for side, measured in found.items()}


def _per_s(value: float, unit: str, reading: Reading) -> float | None:
    """Return how many of the things were done a second whose processor time is reported."""
    if unit.endswith("/s"):
        return value
    return reading.answers_per_s if unit == ROUND_TRIP else None


def _cpu_us(per_s: float | None, *cores: float | None) -> float | None:
    """Return the processor time of each of ``per_s`` things a second."""
    known = [each for each in cores if each is not None]
    return None if not per_s or len(known) < len(cores) else sum(known) / per_s * 1e6


def _spread(measured: Sequence[Measurement]) -> Spread:
    return Spread(
        tuple(each.value for each in measured),
        _known(each.cpu_us for each in measured),
        _known(each.server_cpu_us for each in measured),
    )


def _known(values: Iterable[float | None]) -> tuple[float, ...]:
    """Return ``values``, or none of them where one is not known."""
    every = tuple(values)
    known = tuple(value for value in every if value is not None)
    return known if len(known) == len(every) else ()


def by_turns(sides: Sequence[T], repetition: int) -> Sequence[T]:
    """Return ``sides``, the other way round every second time."""
    return sides[::-1] if repetition % 2 else sides


def ratios(sides: Mapping[str, Spread]) -> dict[str, Spread]:
    """Compare the first side with each other one."""
    (_, ours), *others = sides.items()
    return {f"/ {side}": ratio(ours, theirs) for side, theirs in others}
