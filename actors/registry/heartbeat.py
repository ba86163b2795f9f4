"""The thread in which an endpoint keeps its place in the registry."""

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any

import ray

from rlmesh_ray.actors.ray_metrics import EndpointMetrics
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import find_registry, shared_registry
from rlmesh_ray.server.statistics import Statistics, StatisticsPair

PERIOD_S = 3.0
"""Several fit into a lease: one may be late on a busy machine."""

_TIMEOUT_S = 10.0

_LOG = logging.getLogger(__name__)


class Heartbeat:
    """Announces an endpoint, and renews its lease until it is stopped.

    Args:
        endpoint_id: Whose lease.
        address: Where it serves.
        fleet: Whose it is.
        statistics: Returns what the endpoint has done, for Ray's metrics and for whoever asks the
            registry; None: nothing is told.
        on_superseded: Called, once and in a thread of its own, when another incarnation holds the
            id: this one is on a node that was thought to be lost.
        period_s: How often.
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
        self._retained_calls: set[str] = set()
        node_id = ray.get_runtime_context().get_node_id()
        self._registry = find_registry()
        incarnation = ray.get(self._registry.announce.remote(endpoint_id, address, fleet, node_id))
        self.record = EndpointRecord(endpoint_id, incarnation, address, fleet, node_id)
        self._metrics = EndpointMetrics(self.record)
        self._statistics = statistics
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def suspend(self) -> None:
        """Have nobody sent here any more; the lease is renewed on."""
        self._call_and_retain("suspend")

    def retire(self) -> None:
        """Have no new sessions sent here, and those move that are here; the lease is renewed on."""
        self._call_and_retain("retire")

    def end(self) -> None:
        """Renew the lease no more, and have the registry forget this incarnation."""
        self._stopped.set()
        # Where nobody is told, the lease runs out.
        with contextlib.suppress(ray.exceptions.RayError):
            self._ask("withdraw", self.record.endpoint_id, self.record.incarnation)

    def _run(self) -> None:
        while not self._stopped.wait(self._period_s):
            try:
                if not self._beat() and not self._stopped.is_set():
                    _LOG.warning(
                        "endpoint %s has been started anew elsewhere, and ends here",
                        self.record.endpoint_id,
                    )
                    self._on_superseded()
                    return
            except ray.exceptions.RayError as error:
                # The next beat finds it again; if it has to, it starts it.
                _LOG.info("the registry cannot be reached: %s", str(error).splitlines()[0])
                self._find_again()

    def _beat(self) -> bool:
        """Renew the lease; return whether the id is still this incarnation's."""
        record = self.record
        told = self._statistics_pair()
        if self._ask("renew", record.endpoint_id, record.incarnation, told):
            return True
        if self._stopped.is_set():  # withdrawn meanwhile: not lost, and not to be taken back
            return True
        if not self._ask("resume", record):
            return False
        for method in sorted(self._retained_calls):
            self._ask(method, record.endpoint_id)
        return True

    def _call_and_retain(self, method: str) -> None:
        # A registry that is away now is told again when it takes this endpoint back.
        self._retained_calls.add(method)
        with contextlib.suppress(ray.exceptions.RayError):
            self._ask(method, self.record.endpoint_id)

    def _statistics_pair(self) -> StatisticsPair | None:
        try:
            return self._metrics.feed(self._statistics()) if self._statistics else None
        except Exception:  # noqa: BLE001  # who cannot be measured can be used all the same
            _LOG.exception("the endpoint's metrics cannot be told; please report this")
            self._statistics = None
            return None

    def _ask(self, method: str, *arguments: object) -> Any:
        return ray.get(getattr(self._registry, method).remote(*arguments), timeout=_TIMEOUT_S)

    def _find_again(self) -> None:
        try:
            self._registry = shared_registry()
        except (ValueError, ray.exceptions.RayError):
            return
