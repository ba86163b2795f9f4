"""Statistics of endpoints as Ray metrics, updated at each heartbeat, never at a step.

Without Ray's metrics agent (of ``ray[default]``) Ray drops the values.
"""

import functools
from typing import Any

from ray.util.metrics import Counter, Gauge

from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.server.statistics import (
    RESTARTS,
    TAGS,
    Metric,
    MetricKind,
    Statistics,
    StatisticsPair,
    series_of,
)


class EndpointMetrics:
    """The Ray metrics of one endpoint. For one thread.

    Args:
        record: Record of the endpoint.
        since: Statistics that the metrics do not count; None: they count everything.
    """

    def __init__(self, record: EndpointRecord, since: Statistics | None = None) -> None:
        self._tags = dict(zip(TAGS, (record.endpoint_id, record.fleet), strict=True))
        self._before = since
        # Sums added to Ray's counters so far, by metric and label.
        self._given: dict[tuple[str, str], float] = {}
        self._num_restarts = record.incarnation - 1
        for metric, label, value in series_of(since) if since is not None else ():
            self._given[metric.name, label] = value

    def feed(self, now: Statistics) -> StatisticsPair:
        """Add the difference to the last statistics to the metrics; return both statistics."""
        _instrument(RESTARTS).set(self._num_restarts, self._tags)
        for metric, label, value in series_of(now):
            self._feed(metric, label, value)
        before, self._before = self._before, now
        return StatisticsPair(now, before)

    def _feed(self, metric: Metric, value_of_label: str, value: float) -> None:
        instrument = _instrument(metric)
        tags = {**self._tags, metric.label: value_of_label} if metric.label else self._tags
        if metric.kind is MetricKind.GAUGE:
            instrument.set(value, tags)
            return
        key = metric.name, value_of_label
        grown = value - self._given.get(key, 0.0)
        if grown > 0:  # Ray refuses other values
            instrument.inc(grown, tags)
            self._given[key] = value


@functools.cache
def _instrument(metric: Metric) -> Any:
    """Return Ray's instrument of a metric, one for the process."""
    make: Any = Gauge if metric.kind is MetricKind.GAUGE else Counter
    labels = (metric.label,) if metric.label else ()
    return make(metric.name, metric.description, tag_keys=(*TAGS, *labels))
