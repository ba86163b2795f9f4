"""PoolActor: the registrar of a pool, which keeps the pool's endpoints in the registry."""

import logging
import threading
from dataclasses import dataclass, field

import ray

from rlmesh_ray.actors.actor_restart import start_server
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.heartbeat import PERIOD_S, EndpointMetrics
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import shared_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import client_secret, endpoint_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env_client import shake_hands
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool, full_id
from rlmesh_ray.server.bind_policy import TlsSource, is_wildcard
from rlmesh_ray.server.pool_admission import Registrar
from rlmesh_ray.server.statistics import EnvStatistics, StatisticsPair
from rlmesh_ray.spaces.contract import EnvContract, require_same_contract

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


_LOG = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What the clients of a pool need to know."""

    address: str
    """Address of the registrar."""
    secret: str | None = field(repr=False)
    """Secret from which clients derive endpoints' tokens; no endpoint can register with it."""
    endpoint_tls: ClientTlsSource | None
    """TLS files for dialing the endpoints; None: plain text."""


class PoolMembership:
    """Keeps a pool's endpoints in the cluster's registry, and renews their leases.

    Args:
        pool: Name of the pool.
        secret: Secret of the pool; None: it has none.
        endpoint_tls: TLS files for dialing the endpoints; None: plain text.
    """

    def __init__(self, pool: str, secret: str | None, endpoint_tls: ClientTlsSource | None) -> None:
        self._pool = pool
        self._secret = secret
        self._tls = endpoint_tls
        self._registry = shared_registry()
        self._lock = threading.Lock()
        self._present: dict[str, tuple[EndpointRecord, EnvContract]] = {}
        self._reported = ReportedStatistics()

    def check(self, endpoint_id: str, address: str) -> EnvContract:
        token = self._secret and endpoint_token(self._secret, self._pool, endpoint_id)
        try:
            contract = shake_hands(
                ConnectOptions(address, token, self._tls, timeout_s=_TIMEOUT_S)
            ).contract
        except AccessDeniedError as error:
            raise ConfigurationError(
                f"the endpoint at {address} refuses its pool's token; serve it with the token that "
                "is derived from the pool's secret, as serve-env --register does"
            ) from error
        except EndpointError as error:
            raise EndpointUnreachableError(
                f"the pool cannot reach the endpoint at {address}, the address that it registered: "
                f"{error.message}"
            ) from error
        if not isinstance(contract, EnvContract):
            raise ConfigurationError(f"the endpoint at {address} has no environment contract")
        return contract

    def enter(self, endpoint_id: str, address: str, found: EnvContract) -> int:
        with self._lock:
            for other_id, (_, contract) in self._present.items():
                if other_id != endpoint_id:
                    require_same_contract(contract, found, address)
                    break  # all others have the same contract
            name, fleet = full_id(self._pool, endpoint_id), fleet_name_of_pool(self._pool)
            incarnation = get_result(
                self._registry.announce.remote(name, address, fleet), _TIMEOUT_S
            )
            record = EndpointRecord(name, incarnation, address, fleet)
            self._reported.forget(endpoint_id)
            self._present[endpoint_id] = (record, found)
            return record.incarnation

    def remove(self, endpoint_id: str) -> None:
        with self._lock:
            self._withdraw(endpoint_id)

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Store an endpoint's statistics for the next renewal; see ``PoolRegistry``."""
        self._reported.note(endpoint_id, statistics)

    def clear(self) -> None:
        with self._lock:
            for endpoint_id in list(self._present):
                self._withdraw(endpoint_id)

    def renew(self) -> None:
        """Renew the leases of all endpoints.

        Raises:
            RayError: The registry cannot be reached.
        """
        with self._lock:
            records = [record for record, _ in self._present.values()]
            asked = [
                self._registry.renew.remote(
                    record.endpoint_id,
                    record.incarnation,
                    self._reported.publish(endpoint_id, record),
                )
                for endpoint_id, (record, _) in self._present.items()
            ]
            renewed = ray.get(asked, timeout=_TIMEOUT_S)
            # A registry that has restarted has lost them.
            lost = [each for each, is_known in zip(records, renewed, strict=True) if not is_known]
            ray.get([self._registry.resume.remote(each) for each in lost], timeout=_TIMEOUT_S)

    def _withdraw(self, endpoint_id: str) -> None:
        found = self._present.pop(endpoint_id, None)
        self._reported.forget(endpoint_id)
        if found is not None:
            record, _ = found
            withdrawing = self._registry.withdraw.remote(record.endpoint_id, record.incarnation)
            get_result(withdrawing, _TIMEOUT_S)


@ray.remote(num_cpus=0, max_restarts=-1)
class PoolActor:
    """Runs the registrar of an ``EnvPool``; for its arguments see there."""

    def __init__(
        self,
        pool: str,
        address: str,
        secret: str | None,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
    ) -> None:
        # Raised by the first call, with its own class; see ServerActor.
        self._failure: RlmeshError | None = None
        self._stopping = threading.Event()
        try:
            self._members = PoolMembership(pool, secret, endpoint_tls)
            self._registrar = start_server(
                lambda: Registrar(
                    pool, self._members, address=address, secret=secret, tls=tls
                ).start()
            )
        except RlmeshError as error:
            self._failure = error
            return
        self._info = PoolInfo(
            self._dialable(address), secret and client_secret(secret, pool), endpoint_tls
        )
        threading.Thread(target=self._renew, name="renewals", daemon=True).start()

    def info(self) -> PoolInfo:
        """Return what the clients of the pool need to know.

        Raises:
            RlmeshError: The registrar could not be started.
        """
        if self._failure is not None:
            raise self._failure
        return self._info

    def stop(self) -> None:
        if self._failure is None:
            self._stopping.set()
            self._registrar.stop()
            self._members.clear()

    def _renew(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._members.renew()
            except ray.exceptions.RayError as error:
                # Ray restarts the registry before the leases end.
                _LOG.warning("the registry does not answer: %s", str(error).splitlines()[0])

    def _dialable(self, address: str) -> str:
        wanted, bound = parse_address(address), parse_address(self._registrar.address)
        if not is_wildcard(wanted):
            return str(bound)
        return str(Address(ray.util.get_node_ip_address(), bound.port))
