"""Statistics that the endpoints of a pool report, for the registry and Ray's metrics."""

from rlmesh_ray.actors.ray_metrics import EndpointMetrics
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.server.statistics import EnvStatistics, StatisticsPair

_YOUNG_S = 15.0
"""An endpoint with a longer uptime at its first report served before it joined the pool."""


class ReportedStatistics:
    """The latest statistics of each endpoint of a pool.

    ``note`` may be called from any thread, the other methods from one at a time.
    """

    def __init__(self) -> None:
        self._latest: dict[str, EnvStatistics] = {}
        self._metrics: dict[str, tuple[EndpointRecord, EndpointMetrics]] = {}

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Store an endpoint's statistics. Returns at once."""
        self._latest[endpoint_id] = statistics

    def forget(self, endpoint_id: str) -> None:
        """Drop the statistics of an endpoint that has left or registers again."""
        self._latest.pop(endpoint_id, None)
        self._metrics.pop(endpoint_id, None)

    def publish(self, endpoint_id: str, record: EndpointRecord) -> StatisticsPair | None:
        """Update the metrics with an endpoint's latest statistics; return these and the former.

        Metrics do not count what the endpoint did before it joined the pool.

        Args:
            endpoint_id: Id within the pool.
            record: Record of the endpoint in the registry.

        Returns:
            None if there are no new statistics.
        """
        latest = self._latest.pop(endpoint_id, None)
        if latest is None:
            return None
        known, metrics = self._metrics.get(endpoint_id, (None, None))
        if metrics is None or known != record:
            metrics = EndpointMetrics(record, latest if latest.uptime_s > _YOUNG_S else None)
            self._metrics[endpoint_id] = record, metrics
        return metrics.feed(latest)
