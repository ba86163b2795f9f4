"""The statistics of an endpoint, and the metrics that are read from them: one table.

Statistics are plain records that survive pickling. Counters begin at 0 when the endpoint is made,
and only grow. The annotation of a field holds its metric; JSON, ``/metrics``, Ray's metrics,
``status``, the page and the reports to pools read that. A new metric is one field here, with a
default (endpoints of an older version do not report it), and the code that counts.
"""

import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_type_hints

from rlmesh_ray.histogram import Histogram

PREFIX = "rlmesh_ray"
TAGS = ("endpoint_id", "fleet")
"""The labels of all metrics."""


class MetricKind(enum.Enum):
    """How a value changes."""

    COUNTER = enum.auto()
    """It grows, and begins at 0 with the endpoint's process."""
    GAUGE = enum.auto()
    """It may rise and fall."""
    HISTOGRAM = enum.auto()


def _numbers(value: float | Mapping[str, float] | None) -> Mapping[str, float]:
    if isinstance(value, Mapping):
        return value
    return {} if value is None else {"": value}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of an endpoint, one for each value of a label, or a histogram."""

    name: str
    kind: MetricKind
    description: str
    label: str = ""
    """Distinguishes the numbers; empty: there is one."""
    read: Callable[[Any], Mapping[str, float]] = _numbers
    """Returns the numbers by label, given the value of the field; the key is empty without one."""
    shown: str = ""
    """Name of the value in ``status --json``; empty: the field's name."""
    has_rate: bool = False
    """Whether ``status`` shows how fast it grows."""

    @property
    def exported(self) -> str:
        """The name in Prometheus; Ray puts ``ray_`` before it."""
        return f"{self.name}{'_total' if self.kind is MetricKind.COUNTER else ''}"

    @property
    def series(self) -> "tuple[Metric, ...]":
        """The metric itself; of a histogram, the three that it is in Prometheus' form.

        They are gauges for Ray, whose counters cannot be 0: a quantile would take the lowest bucket
        that is not empty for all that lies below it, too.
        """
        if self.kind is not MetricKind.HISTOGRAM:
            return (self,)
        text = self.description.removesuffix(".")
        gauge = MetricKind.GAUGE
        return (
            Metric(f"{self.name}_bucket", gauge, f"{text}, by bound.", "le", _by_bound),
            Metric(f"{self.name}_sum", gauge, f"{text}, summed up.", read=_total),
            Metric(f"{self.name}_count", gauge, f"{text}, how many.", read=_count),
        )


def _by_bound(histogram: Histogram) -> Mapping[str, float]:
    bounds = [*(f"{bound:g}" for bound in histogram.bounds), "+Inf"]
    return dict(zip(bounds, histogram.cumulative(), strict=True))


def _total(histogram: Histogram) -> Mapping[str, float]:
    return {"": histogram.total}


def _count(histogram: Histogram) -> Mapping[str, float]:
    return {"": histogram.count}


def _metric(kind: MetricKind, name: str, description: str, **options: Any) -> Metric:
    return Metric(f"{PREFIX}_{name}", kind, description, **options)


_counter = functools.partial(_metric, MetricKind.COUNTER)
_gauge = functools.partial(_metric, MetricKind.GAUGE)
_histogram = functools.partial(_metric, MetricKind.HISTOGRAM)


def _transports(sessions: Mapping[str, float]) -> Mapping[str, float]:
    return {name: sessions.get(name, 0) for name in ("shared_memory", "tcp", "grpc")}


def _is_compiled(inference: str) -> Mapping[str, float]:
    return {"": float(inference == "compiled")} if inference else {}


RESTARTS = _gauge("restarts", "How often the endpoint has been started anew.")
"""Not a field: a process does not know how often the endpoint has been started before."""
_UPTIME = _gauge("uptime_seconds", "Age of the endpoint's process.")
_ERRORS = _counter(
    "errors", "Requests that were answered with an error, by its code.", label="code"
)


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """The sessions of an endpoint."""

    open: Annotated[int, _gauge("sessions", "Open sessions.", shown="sessions")] = 0
    """Now."""
    opened: Annotated[int, _counter("sessions_opened", "Sessions begun.")] = 0
    refused: Annotated[
        int, _counter("sessions_refused", "Sessions that there was no place for.")
    ] = 0
    """Because the endpoint was full. Clients without a token, or with a failed handshake, do not
    count."""
    lost: Annotated[int, _counter("sessions_lost", "Sessions that ended without Close.")] = 0
    """Ended without Close, while the endpoint would have gone on."""


@dataclass(frozen=True, slots=True)
class EnvStatistics:
    """The statistics of an environment endpoint."""

    service: ClassVar[str] = "env"
    """Its name in ``status`` and for observers."""
    version: str
    """Version of this package."""
    uptime_s: Annotated[float, _UPTIME]
    """Since the endpoint was made."""
    sessions: SessionStatistics
    """A world of dm_env_rpc is a session; it is never lost."""
    steps: Annotated[int, _counter("env_steps", "Vector steps that succeeded.", has_rate=True)]
    """Vector steps that succeeded, over all transports."""
    lane_steps: Annotated[int, _counter("env_lane_steps", "Steps of single lanes.", has_rate=True)]
    """Steps of single lanes; the one that resets a lane by itself is one of them."""
    resets: Annotated[int, _counter("env_resets", "Resets that succeeded.")]
    """Resets that succeeded, of all lanes or of some."""
    episodes: Annotated[int, _counter("env_episodes", "Episodes that ended.")]
    """Lanes that were seen to end; what is cut off by a Reset or by the end of a session is not."""
    errors: Annotated[Mapping[str, int], _ERRORS]
    """Requests that were answered with an error, by its code."""
    deviations: Annotated[
        int,
        _counter(
            "env_deviations",
            "Values out of range that were delivered, or that have truncated an episode.",
        ),
    ]
    """Values out of their range, and rewards that are not finite. Of those that were delivered all
    the same, one a vector step, side (action, observation, reward), leaf and kind, however many
    lanes had it. Of those that have truncated episodes (``on_bad_value="truncate"``), one an
    episode, so one a lane."""
    transports: Annotated[
        Mapping[str, int],
        _gauge(
            "env_sessions_by_transport",
            "Open sessions, by what their steps travel by.",
            label="transport",
            read=_transports,
        ),
    ]
    """Open sessions by their present transport: shared_memory, tcp or grpc."""
    worker_restarts: Annotated[
        int,
        _counter("env_worker_restarts", "Worker processes that were replaced within a session."),
    ]
    """Worker processes that were replaced within a session, since they had ended or were killed."""
    step_s: Annotated[
        Histogram, _histogram("env_step_seconds", "How long workers take for a vector step.")
    ]
    """How long the worker took for each of ``steps``; over a Join stream, with the way to the
    worker and back."""


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The statistics of a policy endpoint; ``items`` are predictions."""

    service: ClassVar[str] = "model"
    """Its name in ``status`` and for observers."""
    items_waiting: Annotated[
        int, _gauge("predictions_waiting", "Predictions that wait for a batch.", shown="waiting")
    ]
    rows_waiting: int
    is_busy: bool
    """Whether the policy runs."""
    batches: Annotated[int, _counter("batches", "Batches that have begun.")]
    items: Annotated[
        int,
        _counter("predictions", "Predictions that have begun.", shown="predictions", has_rate=True),
    ]
    rows: Annotated[int, _counter("rows", "Rows of these predictions.")]
    cancelled: int
    """Predictions that were cancelled before they ran."""
    waited_s: float
    """Time between arrival and start, summed over all predictions that have started."""
    longest_wait_s: float
    busy_s: float
    """Total time of finished batches."""
    version: str
    """Version of this package."""
    uptime_s: Annotated[float, _UPTIME]
    """Since the endpoint was made."""
    sessions: SessionStatistics
    routes: Annotated[int, _gauge("routes", "Open routes.")]
    """Open routes."""
    policy_version: Annotated[int, _gauge("policy_version", "Of the weights that act.")]
    """Version of the policy's present weights; 0: those that it was made with."""
    errors: Annotated[Mapping[str, int], _ERRORS]
    """Requests that were answered with an error, by its code."""
    batch_rows: Annotated[
        Histogram, _histogram("batch_rows", "Rows of a batch.", shown="rows_per_batch")
    ]
    """Rows of each batch that has run."""
    queue_s: Annotated[
        Histogram, _histogram("queue_seconds", "How long a prediction waits for its batch.")
    ]
    """How long each prediction waited for its batch."""
    forward_s: Annotated[
        Histogram, _histogram("forward_seconds", "How long the policy takes for a batch.")
    ]
    """How long the policy took for each batch."""
    # Last, and with defaults: an endpoint of an older version says nothing of them.
    inference: Annotated[
        str,
        _gauge(
            "compiled_inference",
            "1 where the policy's module runs compiled, 0 in torch; functions have none.",
            read=_is_compiled,
        ),
    ] = ""
    """How the policy's module runs now: ``"compiled"`` or ``"torch"``; empty: the policy has no
    such choice, or the endpoint does not say."""
    torch_reason: str = ""
    """Why it runs in torch."""


Statistics = EnvStatistics | ModelStatistics


@dataclass(frozen=True, slots=True)
class StatisticsPair:
    """Two statistics of one endpoint, at two times: their difference gives the present rates."""

    now: Statistics
    before: Statistics | None = None
    """The earlier ones; None: there are none since the endpoint started."""


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


def snapshot(statistics: Statistics | SessionStatistics) -> dict[str, Any]:
    """Return the values of all fields by name; those of sessions begin with ``sessions_``."""
    values: dict[str, Any] = {}
    for each in fields(statistics):
        # What an older version has pickled lacks the newer attributes.
        value = getattr(statistics, each.name, each.default)
        if isinstance(value, SessionStatistics):
            values |= {f"sessions_{name}": count for name, count in snapshot(value).items()}
        else:
            values[each.name] = value
    return values


def _metrics_of(kind: Any) -> Mapping[str, Metric]:
    found: dict[str, Metric] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if hint is SessionStatistics:
            found |= {f"sessions_{key}": each for key, each in _metrics_of(hint).items()}
        else:
            for metric in getattr(hint, "__metadata__", ()):
                found[name] = metric
    return found


metrics_of: Callable[[Any], Mapping[str, Metric]] = functools.cache(_metrics_of)
"""Returns the metrics of a class of statistics, by the names of ``snapshot``."""


def series_of(statistics: Statistics) -> Iterator[tuple[Metric, str, float]]:
    """Yield each metric with each value of its label and the number; histograms as ``series``."""
    values = snapshot(statistics)
    for name, metric in metrics_of(type(statistics)).items():
        for series in metric.series:
            for label, number in series.read(values[name]).items():
                yield series, label, number


ALL_METRICS = tuple(
    series
    for metric in dict.fromkeys(
        (*metrics_of(EnvStatistics).values(), *metrics_of(ModelStatistics).values(), RESTARTS)
    )
    for series in metric.series
)
"""All that endpoints export, histograms as ``series``."""
