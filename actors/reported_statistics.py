"""What the endpoints of a pool tell of themselves, on its way to the registry and Ray's metrics."""

from rlmesh_ray.actors.ray_metrics import EndpointMetrics
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.server.statistics import EnvStatistics, StatisticsPair

_YOUNG_S = 15.0
"""Who tells for the first time and is older has been in the pool before, or served others."""


class ReportedStatistics:
    """The latest that each endpoint of a pool has told.

    ``note`` may be called from any thread, all else from one at a time.
    """

    def __init__(self) -> None:
        self._latest: dict[str, EnvStatistics] = {}
        self._metrics: dict[str, tuple[EndpointRecord, EndpointMetrics]] = {}

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Take notice of what an endpoint has told. At once."""
        self._latest[endpoint_id] = statistics

    def forget(self, endpoint_id: str) -> None:
        """Drop what an endpoint has told: it has left, or comes anew."""
        self._latest.pop(endpoint_id, None)
        self._metrics.pop(endpoint_id, None)

    def publish(self, endpoint_id: str, record: EndpointRecord) -> StatisticsPair | None:
        """Feed the metrics with what an endpoint has told since the last look; return both.

        What happened before it came into the pool is not counted.

        Args:
            endpoint_id: Within the pool.
            record: Of the endpoint, in the registry.

        Returns:
            None: it has told nothing, or nothing new.
        """
        latest = self._latest.pop(endpoint_id, None)
        if latest is None:
            return None
        known, metrics = self._metrics.get(endpoint_id, (None, None))
        if metrics is None or known != record:
            metrics = EndpointMetrics(record, latest if latest.uptime_s > _YOUNG_S else None)
            self._metrics[endpoint_id] = record, metrics
        return metrics.feed(latest)
