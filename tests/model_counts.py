"""Statistics of a policy endpoint, for tests of what shows or exports them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlmesh_ray import __version__
from rlmesh_ray.histogram import (
    BATCH_BOUNDS_ROWS,
    DURATION_BOUNDS_NS,
    NS_PER_S,
    Histogram,
    HistogramCounter,
    histogram_of,
)
from rlmesh_ray.server.observe.statistics import ModelStatistics, SessionStatistics


def model_statistics(
    rows: Sequence[int] = (),
    /,
    *,
    forward_ns: int = 0,
    waited_ns: Sequence[int] = (),
    **changes: Any,
) -> ModelStatistics:
    """Return the statistics after batches of so many rows, with some fields set."""
    plain = ModelStatistics(
        items_waiting=0,
        rows_waiting=0,
        is_busy=False,
        batches=len(rows),
        items=len(rows),
        rows=sum(rows),
        cancelled=0,
        waited_s=0.0,
        longest_wait_s=0.0,
        busy_s=0.0,
        version=__version__,
        uptime_s=0.0,
        sessions=SessionStatistics(),
        routes=0,
        policy_version=0,
        errors={},
        batch_rows=_counted(BATCH_BOUNDS_ROWS, rows),
        queue_s=_counted(DURATION_BOUNDS_NS, waited_ns, NS_PER_S),
        forward_s=_counted(DURATION_BOUNDS_NS, [forward_ns] * len(rows), NS_PER_S),
    )
    return replace(plain, **changes)


def _counted(bounds: tuple[int, ...], values: Sequence[int], unit: int = 1) -> Histogram:
    counter = HistogramCounter(bounds)
    for value in values:
        counter.add(value)
    return histogram_of(bounds, counter.read(), unit)
