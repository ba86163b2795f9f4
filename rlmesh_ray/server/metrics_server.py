"""``/metrics`` for Prometheus, without Ray: an HTTP server over endpoints' statistics.

A scrape reads counters, in a thread of its own; it asks no worker, so that no step waits for it.
"""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rlmesh_ray.errors import AddressError, ListenError, MissingPackageError, install_command
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.server.metrics import RESTARTS, TAGS, Metric, families_of
from rlmesh_ray.server.statistics import Statistics

_LOG = logging.getLogger(__name__)


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


class StatisticsCollector:
    """A collector of prometheus_client, over the table of metrics."""

    def __init__(self, measured: Measured) -> None:
        self._measured = measured

    def collect(self) -> Iterable[Any]:
        """Return each metric, with its values for all endpoints."""
        from prometheus_client import Metric as Family

        families: dict[str, Family] = {}
        for endpoint in self._measured():
            tags = dict(zip(TAGS, (endpoint.endpoint_id, endpoint.fleet), strict=True))
            for metric in (*families_of(endpoint.statistics), RESTARTS):
                kind = metric.kind.name.lower() if isinstance(metric, Metric) else "histogram"
                new = Family(metric.name, metric.description, kind)
                family = families.setdefault(metric.name, new)
                for part in metric.metrics:
                    for value_of_label, value in part.read(endpoint.statistics).items():
                        own = {part.label: value_of_label} if part.label else {}
                        family.add_sample(part.exported, tags | own, value)
            if endpoint.restarts is not None:
                families[RESTARTS.name].add_sample(RESTARTS.exported, tags, endpoint.restarts)
        return families.values()


@contextlib.contextmanager
def serve_metrics(address: str, measured: Measured) -> Iterator[str]:
    """Serve the metrics of endpoints to Prometheus at ``http://ADDRESS/metrics``.

    A context manager, which yields the address. Every client that reaches it may read the metrics,
    without a token: the names and addresses of endpoints, and counts.

    Args:
        address: ``HOST:PORT`` (port 0: a free one).
        measured: Returns endpoints, with the statistics of an ``EnvServer`` or a ``ModelServer``.
            It is called at each scrape, in a thread.

    Raises:
        MissingPackageError: prometheus_client is not installed.
        AddressError: ``address`` is malformed, a unix socket, in use, or not this machine's.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise MissingPackageError(
            f"metrics need: {install_command('prometheus')}, or pip install prometheus-client"
        ) from error
    place = parse_address(address)
    if place.path:
        raise AddressError(f"Prometheus cannot dial {address}, a unix socket; write HOST:PORT")
    registry = CollectorRegistry()
    registry.register(StatisticsCollector(measured))
    try:
        http, thread = start_http_server(place.port, place.host, registry)
    except OSError as error:
        raise ListenError(
            f"cannot serve metrics on {place}: {error}; choose another port, or 0 for a free one"
        ) from error
    if not place.is_local:
        _LOG.warning("metrics at %s can be read from other machines, without a token", place)
    try:
        yield str(Address(place.host, http.server_port))
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
