"""Heartbeat: the thread that renews an endpoint's lease in the registry."""

import contextlib
import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Literal

import ray
from ray.util.metrics import Counter, Gauge

from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import find_registry, shared_registry
from rlmesh_ray.server.observe.statistics import (
    RESTARTS,
    TAGS,
    Metric,
    MetricKind,
    Statistics,
    StatisticsPair,
    series_of,
)

PERIOD_S = 3.0
"""Several fit into a lease, so that one may be late on a busy machine."""

_TIMEOUT_S = 10.0

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Announces an endpoint, and renews its lease until ``end``.

    ``statistics`` returns what Ray's metrics and the registry get. ``on_superseded`` is called
    once, in the heartbeat's thread, when another incarnation holds the id: Ray took this one's
    node for lost.
    """

    def __init__(
        self,
        endpoint_id: str,
        address: str,
        *,
        fleet: str = "",
        statistics: Callable[[], Statistics] | None = None,
        on_superseded: Callable[[], object] = lambda: None,
        period_s: float = PERIOD_S,
    ) -> None:
        self._on_superseded = on_superseded
        self._period_s = period_s
        self._stopped = threading.Event()
        self._left_by: Literal["suspend", "retire", ""] = ""
        node_id = ray.get_runtime_context().get_node_id()
        self._registry = find_registry()
        incarnation = ray.get(self._registry.announce.remote(endpoint_id, address, fleet, node_id))
        self.record = EndpointRecord(endpoint_id, incarnation, address, fleet, node_id)
        self._metrics = EndpointMetrics(self.record)
        self._statistics = statistics
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def leave(self, method: Literal["suspend", "retire"]) -> None:
        """Have the registry suspend or retire the endpoint; its lease is still renewed."""
        # A registry that restarts now gets the call again after ``resume``.
        self._left_by = method
        with contextlib.suppress(ray.exceptions.RayError):
            self._ask(method, self.record.endpoint_id)

    def end(self) -> None:
        """Stop the renewals, and have the registry drop this incarnation."""
        self._stopped.set()
        # If the call fails, the lease expires.
        with contextlib.suppress(ray.exceptions.RayError):
            self._ask("withdraw", self.record.endpoint_id, self.record.incarnation)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                if not self._renew() and not self._stopped.is_set():
                    _LOG.warning(
                        "endpoint %s has been started again elsewhere; this one ends",
                        self.record.endpoint_id,
                    )
                    self._on_superseded()
                    return
            except ray.exceptions.RayError as error:
                # The next heartbeat uses a registry that this finds, or starts.
                _LOG.info("the registry cannot be reached: %s", str(error).splitlines()[0])
                with contextlib.suppress(ValueError, ray.exceptions.RayError):
                    self._registry = shared_registry()

    def _renew(self) -> bool:
        """Renew the lease; return whether this incarnation still holds the id."""
        record = self.record
        statistics = self._statistics_pair()
        if self._ask("renew", record.endpoint_id, record.incarnation, statistics):
            return True
        if self._stopped.is_set():  # withdrawn meanwhile, on purpose
            return True
        if not self._ask("resume", record):
            return False
        if self._left_by:
            self._ask(self._left_by, record.endpoint_id)
        return True

    def _statistics_pair(self) -> StatisticsPair | None:
        try:
            return self._metrics.feed(self._statistics()) if self._statistics else None
        except Exception:  # noqa: BLE001  # an endpoint without metrics can still be used
            _LOG.exception("the endpoint's metrics cannot be read; please report this")
            self._statistics = None
            return None

    def _ask(self, method: str, *arguments: object) -> Any:
        return ray.get(getattr(self._registry, method).remote(*arguments), timeout=_TIMEOUT_S)


class EndpointMetrics:
    """The Ray metrics of one endpoint, without what ``since`` counts already. For one thread."""

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
            instrument, key = _instrument(metric), (metric.name, label)
            tags = {**self._tags, metric.label: label} if metric.label else self._tags
            if metric.kind is MetricKind.GAUGE:
                instrument.set(value, tags)
            elif (grown := value - self._given.get(key, 0.0)) > 0:  # Ray refuses other values
                instrument.inc(grown, tags)
                self._given[key] = value
        before, self._before = self._before, now
        return StatisticsPair(now, before)


@functools.cache
def _instrument(metric: Metric) -> Any:
    make: Any = Gauge if metric.kind is MetricKind.GAUGE else Counter
    labels = (metric.label,) if metric.label else ()
    return make(metric.name, metric.description, tag_keys=(*TAGS, *labels))
