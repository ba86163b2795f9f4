"""PoolActor: the registrar of a pool, and what it keeps in the cluster's registry."""

import logging
import threading
from dataclasses import dataclass, field

import ray

from rlmesh_ray.actors.calls import answer
from rlmesh_ray.actors.coming_back import started
from rlmesh_ray.actors.heartbeat import PERIOD_S
from rlmesh_ray.actors.ledger import EndpointRecord
from rlmesh_ray.actors.registry import shared_registry
from rlmesh_ray.actors.told import Told
from rlmesh_ray.client.channel import Dial
from rlmesh_ray.client.env_client import shake_hands
from rlmesh_ray.client.tls import ClientTlsSource
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    EndpointUnreachableError,
    RlmeshError,
)
from rlmesh_ray.protocol.address import Address, parse_address
from rlmesh_ray.protocol.attendance import clients_secret, endpoint_token, fleet_of, full_id
from rlmesh_ray.server.access import TlsSource, is_wildcard
from rlmesh_ray.server.registrar import Registrar
from rlmesh_ray.server.statistics import EnvStatistics
from rlmesh_ray.spaces.contract import EnvContract, require_same_contract

_LOG = logging.getLogger(__name__)

_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What users of a pool have to know."""

    address: str
    """Of the registrar."""
    secret: str | None = field(repr=False)
    """Of its clients: endpoints' tokens are derived from it. It registers nobody."""
    endpoint_tls: ClientTlsSource | None


class RegistryBook:
    """Keeps a pool's endpoints in the cluster's registry, and renews their leases.

    Args:
        pool: Its name.
        secret: Its secret; None: it has none.
        endpoint_tls: How endpoints are dialed.
    """

    def __init__(self, pool: str, secret: str | None, endpoint_tls: ClientTlsSource | None) -> None:
        self._pool = pool
        self._secret = secret
        self._tls = endpoint_tls
        self._registry = shared_registry()
        self._lock = threading.Lock()
        self._present: dict[str, tuple[EndpointRecord, EnvContract]] = {}
        self._told = Told()

    def check(self, endpoint_id: str, address: str) -> EnvContract:
        """Return what an endpoint serves; see ``Book``."""
        token = self._secret and endpoint_token(self._secret, self._pool, endpoint_id)
        try:
            contract = shake_hands(Dial(address, token, self._tls, timeout_s=_TIMEOUT_S)).contract
        except AccessDeniedError as error:
            raise ConfigurationError(
                f"the endpoint at {address} does not let its pool in; serve it with the token that "
                "is derived from the pool's secret, as serve-env --register does"
            ) from error
        except EndpointError as error:
            raise EndpointUnreachableError(
                f"the pool cannot reach the endpoint at {address}, where it says that it is: "
                f"{error.message}"
            ) from error
        if not isinstance(contract, EnvContract):
            raise ConfigurationError(f"the endpoint at {address} tells no environment contract")
        return contract

    def enter(self, endpoint_id: str, address: str, found: EnvContract) -> int:
        """Announce an endpoint to the registry; see ``Book``."""
        with self._lock:
            for other_id, (_, contract) in self._present.items():
                if other_id != endpoint_id:
                    require_same_contract(contract, found, address)
                    break  # the others are like this one
            name, fleet = full_id(self._pool, endpoint_id), fleet_of(self._pool)
            incarnation = answer(self._registry.announce.remote(name, address, fleet), _TIMEOUT_S)
            record = EndpointRecord(name, incarnation, address, fleet)
            self._told.forget(endpoint_id)
            self._present[endpoint_id] = (record, found)
            return record.incarnation

    def strike(self, endpoint_id: str) -> None:
        """Withdraw an endpoint from the registry; see ``Book``."""
        with self._lock:
            self._withdraw(endpoint_id)

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        """Keep what an endpoint tells for the next renewal; see ``Book``."""
        self._told.note(endpoint_id, statistics)

    def clear(self) -> None:
        """Withdraw all endpoints from the registry."""
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
                    record.endpoint_id, record.incarnation, self._told.look(endpoint_id, record)
                )
                for endpoint_id, (record, _) in self._present.items()
            ]
            renewed = ray.get(asked, timeout=_TIMEOUT_S)
            # A registry that has restarted knows none of them.
            lost = [each for each, is_known in zip(records, renewed, strict=True) if not is_known]
            ray.get([self._registry.resume.remote(each) for each in lost], timeout=_TIMEOUT_S)

    def _withdraw(self, endpoint_id: str) -> None:
        found = self._present.pop(endpoint_id, None)
        self._told.forget(endpoint_id)
        if found is not None:
            record, _ = found
            withdrawing = self._registry.withdraw.remote(record.endpoint_id, record.incarnation)
            answer(withdrawing, _TIMEOUT_S)


@ray.remote(num_cpus=0, max_restarts=-1)
class PoolActor:
    """Runs the registrar of an ``EnvPool``, whose arguments it takes."""

    def __init__(
        self,
        pool: str,
        address: str,
        secret: str | None,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
    ) -> None:
        # Kept, it is raised by whatever is called first, as what it is.
        self._failure: RlmeshError | None = None
        self._stopping = threading.Event()
        try:
            self._book = RegistryBook(pool, secret, endpoint_tls)
            self._registrar = started(
                lambda: Registrar(pool, self._book, address=address, secret=secret, tls=tls).start()
            )
        except RlmeshError as error:
            self._failure = error
            return
        self._facts = PoolFacts(
            self._dialable(address), secret and clients_secret(secret, pool), endpoint_tls
        )
        threading.Thread(target=self._renew, name="renewals", daemon=True).start()

    def facts(self) -> PoolFacts:
        """Return what users of the pool have to know.

        Raises:
            RlmeshError: It could not be started.
        """
        if self._failure is not None:
            raise self._failure
        return self._facts

    def stop(self) -> None:
        """Take no endpoints any more, and withdraw those that are there."""
        if self._failure is None:
            self._stopping.set()
            self._registrar.stop()
            self._book.clear()

    def _renew(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                self._book.renew()
            except ray.exceptions.RayError as error:
                # It restarts by itself; leases last longer than that takes.
                _LOG.warning("the registry does not answer: %s", str(error).splitlines()[0])

    def _dialable(self, address: str) -> str:
        wanted, bound = parse_address(address), parse_address(self._registrar.address)
        if not is_wildcard(wanted):
            return str(bound)
        return str(Address(ray.util.get_node_ip_address(), bound.port))
