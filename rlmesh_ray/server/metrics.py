"""The metrics of endpoints: their names, and how they are read from the statistics.

Ray's exporter and the server of ``/metrics`` use this one table. A histogram is three metrics in
Prometheus' form, of which one counts by upper bound. They are gauges for Ray, whose counters cannot
be 0: a quantile would take the lowest bucket that is not empty for all that lies below it, too.
"""

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.histogram import Histogram
from rlmesh_ray.server.statistics import EnvStatistics, Statistics

PREFIX = "rlmesh_ray"
TAGS = ("endpoint_id", "fleet")
"""The labels of all metrics."""

Numbers = Mapping[str, float]
"""Values by the metric's own label; the key is empty where it has none."""


@dataclass(frozen=True, slots=True)
class MeasuredEndpoint:
    """The statistics of an endpoint, with its labels."""

    endpoint_id: str
    statistics: Statistics
    fleet: str = ""
    restarts: int | None = None
    """None: not known."""


Measured = Callable[[], Iterable[MeasuredEndpoint]]
"""Returns endpoints; it is called at each scrape, in a thread."""


class MetricKind(enum.Enum):
    """How a value changes."""

    COUNTER = enum.auto()
    """It grows, and begins at 0 with the endpoint's process."""
    GAUGE = enum.auto()
    """It may rise and fall."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an endpoint, or one for each value of a label."""

    name: str
    kind: MetricKind
    description: str
    read: Callable[[Any], Numbers]
    """Reads it from statistics."""
    label: str = ""
    """Distinguishes the numbers; empty: there is one."""

    @property
    def exported(self) -> str:
        """The name in Prometheus; Ray puts ``ray_`` before it."""
        return f"{self.name}{'_total' if self.kind is MetricKind.COUNTER else ''}"

    @property
    def metrics(self) -> tuple["Metric", ...]:
        """Itself, as of a ``HistogramMetric``."""
        return (self,)


@dataclass(frozen=True, slots=True)
class HistogramMetric:
    """The metrics of a histogram; ``histogram_quantile`` takes the rate of ``bucket``."""

    bucket: Metric
    """Counts by the label ``le``; the last, ``+Inf``, counts all."""
    total: Metric
    """Sum of the values."""
    count: Metric
    """Their number."""
    name: str
    description: str

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """All of them."""
        return self.bucket, self.total, self.count


def _counter(name: str, description: str, value: Callable[[Any], float]) -> Metric:
    return Metric(
        f"{PREFIX}_{name}",
        MetricKind.COUNTER,
        description,
        lambda statistics: {"": value(statistics)},
    )


def _gauge(name: str, description: str, value: Callable[[Any], float]) -> Metric:
    return Metric(
        f"{PREFIX}_{name}",
        MetricKind.GAUGE,
        description,
        lambda statistics: {"": value(statistics)},
    )


def _histogram(name: str, description: str, value: Callable[[Any], Histogram]) -> HistogramMetric:
    def by_bound(statistics: Any) -> Numbers:
        histogram = value(statistics)
        bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
        return dict(zip(bounds, histogram.cumulative(), strict=True))

    bucket_name, description_of_buckets = f"{PREFIX}_{name}_bucket", f"{description}, by bound."
    return HistogramMetric(
        Metric(bucket_name, MetricKind.GAUGE, description_of_buckets, by_bound, "le"),
        _gauge(
            f"{name}_sum", f"{description}, summed up.", lambda statistics: value(statistics).total
        ),
        _gauge(
            f"{name}_count", f"{description}, how many.", lambda statistics: value(statistics).count
        ),
        f"{PREFIX}_{name}",
        f"{description}.",
    )


SESSIONS = _gauge("sessions", "Open sessions.", lambda statistics: statistics.sessions.open)
SESSIONS_OPENED = _counter(
    "sessions_opened", "Sessions begun.", lambda statistics: statistics.sessions.opened
)
SESSIONS_REFUSED = _counter(
    "sessions_refused",
    "Sessions that there was no place for.",
    lambda statistics: statistics.sessions.refused,
)
SESSIONS_LOST = _counter(
    "sessions_lost",
    "Sessions that ended without Close.",
    lambda statistics: statistics.sessions.lost,
)
ERRORS = Metric(
    f"{PREFIX}_errors",
    MetricKind.COUNTER,
    "Requests that were answered with an error, by its code.",
    lambda statistics: statistics.errors,
    "code",
)
UPTIME = _gauge(
    "uptime_seconds", "Age of the endpoint's process.", lambda statistics: statistics.uptime_s
)

ENV_STEPS = _counter(
    "env_steps", "Vector steps that succeeded.", lambda statistics: statistics.steps
)
ENV_LANE_STEPS = _counter(
    "env_lane_steps", "Steps of single lanes.", lambda statistics: statistics.lane_steps
)
ENV_RESETS = _counter("env_resets", "Resets that succeeded.", lambda statistics: statistics.resets)
ENV_EPISODES = _counter(
    "env_episodes", "Episodes that ended.", lambda statistics: statistics.episodes
)
WORKER_RESTARTS = _counter(
    "env_worker_restarts",
    "Worker processes that were replaced within a session.",
    lambda statistics: statistics.worker_restarts,
)
TRANSPORTS = Metric(
    f"{PREFIX}_env_sessions_by_transport",
    MetricKind.GAUGE,
    "Open sessions, by what their steps travel by.",
    lambda statistics: {
        name: statistics.transports.get(name, 0) for name in ("shared_memory", "tcp", "grpc")
    },
    "transport",
)
DEVIATIONS = _counter(
    "env_deviations",
    "Values out of range that were delivered, or that have truncated an episode.",
    lambda statistics: statistics.deviations,
)
ENV_STEP_SECONDS = _histogram(
    "env_step_seconds",
    "How long workers take for a vector step",
    lambda statistics: statistics.step_s,
)

PREDICTIONS = _counter(
    "predictions", "Predictions that have begun.", lambda statistics: statistics.items
)
ROWS = _counter("rows", "Rows of these predictions.", lambda statistics: statistics.rows)
BATCHES = _counter("batches", "Batches that have begun.", lambda statistics: statistics.batches)
WAITING = _gauge(
    "predictions_waiting",
    "Predictions that wait for a batch.",
    lambda statistics: statistics.items_waiting,
)
ROUTES = _gauge("routes", "Open routes.", lambda statistics: statistics.routes)
POLICY_VERSION = _gauge(
    "policy_version", "Of the weights that act.", lambda statistics: statistics.policy_version
)
COMPILED_INFERENCE = Metric(
    f"{PREFIX}_compiled_inference",
    MetricKind.GAUGE,
    "1 where the policy's module runs compiled, 0 in torch; functions have none.",
    lambda statistics: (
        {"": float(statistics.inference == "compiled")} if statistics.inference else {}
    ),
)
BATCH_ROWS = _histogram("batch_rows", "Rows of a batch", lambda statistics: statistics.batch_rows)
QUEUE_SECONDS = _histogram(
    "queue_seconds",
    "How long a prediction waits for its batch",
    lambda statistics: statistics.queue_s,
)
FORWARD_SECONDS = _histogram(
    "forward_seconds",
    "How long the policy takes for a batch",
    lambda statistics: statistics.forward_s,
)

RESTARTS = Metric(
    f"{PREFIX}_restarts",
    MetricKind.GAUGE,
    "How often the endpoint has been started anew.",
    lambda _: {},  # an endpoint's process does not know of former ones
)

_OF_BOTH = (SESSIONS, SESSIONS_OPENED, SESSIONS_REFUSED, SESSIONS_LOST, ERRORS, UPTIME)
_OF_ENVS = (
    ENV_STEPS,
    ENV_LANE_STEPS,
    ENV_RESETS,
    ENV_EPISODES,
    WORKER_RESTARTS,
    TRANSPORTS,
    DEVIATIONS,
    ENV_STEP_SECONDS,
)
_OF_MODELS = (
    PREDICTIONS,
    ROWS,
    BATCHES,
    WAITING,
    ROUTES,
    POLICY_VERSION,
    COMPILED_INFERENCE,
    BATCH_ROWS,
    QUEUE_SECONDS,
    FORWARD_SECONDS,
)
ALL_METRICS = tuple(
    part for each in (*_OF_BOTH, RESTARTS, *_OF_ENVS, *_OF_MODELS) for part in each.metrics
)


def families_of(statistics: Statistics) -> tuple[Metric | HistogramMetric, ...]:
    """Return the metrics and the histograms that can be read from such statistics."""
    return _OF_BOTH + (_OF_ENVS if isinstance(statistics, EnvStatistics) else _OF_MODELS)


def metrics_of(statistics: Statistics) -> tuple[Metric, ...]:
    """Return the metrics that can be read from such statistics, with those of histograms."""
    return tuple(part for each in families_of(statistics) for part in each.metrics)
