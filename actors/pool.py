"""EnvPool: endpoints outside of Ray that register themselves, and the registrar's actor."""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.ray_calls import StoppedAtExit, get_result, stop_actor
from rlmesh_ray.actors.registry.assignment_table import EndpointRecord
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver, call_registry
from rlmesh_ray.actors.registry.heartbeat import PERIOD_S, EndpointMetrics
from rlmesh_ray.actors.registry.registry_actor import (
    REGISTRY_NAMESPACE,
    find_actor,
    shared_registry,
)
from rlmesh_ray.actors.server_actor import ServerActor, dialable_address
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import (
    TokenSource,
    bearer_value,
    client_secret,
    client_token_of,
    endpoint_token,
)
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.client.env.env_client import shake_hands
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    EndpointTimeoutError,
    EndpointUnreachableError,
)
from rlmesh_ray.protocol.pool_membership import checked_name, fleet_name_of_pool, full_id
from rlmesh_ray.server.endpoint.bind_policy import TlsSource
from rlmesh_ray.server.observe.statistics import EnvStatistics, StatisticsPair
from rlmesh_ray.server.pool.pool_admission import Registrar
from rlmesh_ray.spaces.contract import EnvContract, require_same_contract

_LOG = logging.getLogger(__name__)

_POLL_S = 0.2
_ANSWER_S = 30.0
_STOP_S = 10.0
_TIMEOUT_S = 10.0
_YOUNG_S = 15.0
"""An endpoint with a longer uptime at its first report served before it joined the pool."""


class EnvPool(StoppedAtExit):
    """Endpoints outside of Ray that register themselves, and come and go while training runs.

    The pool's registrar listens on this node. An endpoint needs no Ray; it dials the registrar:

        rlmesh-ray serve-env my:Game-v0 --address HOST:0 \
            --register games@REGISTRAR:7070 --pool-token-file FILE

    The pool checks each endpoint before it accepts it: the endpoint must be reachable at the
    address that it reports, and serve the same spaces at the same width as the endpoints in the
    pool. It is in the pool as long as its connection to the registrar lives; when it registers
    again, even at another address, sessions find it there. The registrar itself restarts at its
    address if that has a fixed port, and sessions go on meanwhile.

    The pool lives as long as this object or until ``stop``. Make it on the driver. Usable as a
    context manager.

    Args:
        name: Name of the pool, unique in the cluster.
        address: The address that the registrar listens on, ``HOST:PORT``.
        token: Secret that the pool and its endpoints share, or a ``TokenFile`` with it; required
            unless ``address`` is loopback. It does not travel: the tokens of endpoints at the
            registrar, and of clients at each endpoint, are derived from it.
        tls: TLS files of the registrar.
        endpoint_tls: TLS files for dialing the endpoints, if they use TLS: then all of them must.

    Raises:
        ConfigurationError: An argument is wrong, or the cluster has a pool of that name.
        AddressError: The address is in use, not this machine's, or needs a token.
    """

    def __init__(
        self,
        name: str,
        *,
        address: str = "127.0.0.1:0",
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        endpoint_tls: ClientTlsSource | None = None,
    ) -> None:
        checked_name(name, "name")
        secret = None if token is None else client_token_of(token)
        if secret is not None:
            bearer_value(secret)  # refuses False
        shared_registry()
        actor_class: Any = PoolActor
        try:
            actor = actor_class.options(
                name=fleet_name_of_pool(name),
                namespace=REGISTRY_NAMESPACE,
                # On this node, which has the address.
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
            ).remote(name, address, secret, tls, endpoint_tls)
        except ValueError as error:
            raise ConfigurationError(
                f"the cluster has a pool {name!r} already; use it (EnvPool.find({name!r})), or "
                "give this one another name"
            ) from error
        self._use(actor, name, is_own=True)

    @classmethod
    def find(cls, name: str) -> Self:
        """Return the pool of that name, which another program has started and will stop.

        Raises:
            ConfigurationError: ``name`` is malformed.
            EndpointUnreachableError: The cluster has no pool of that name.
        """
        try:
            actor = find_actor(fleet_name_of_pool(checked_name(name, "name")))
        except ValueError as error:
            raise EndpointUnreachableError(
                f"the cluster has no pool {name!r}; start it: rlmesh-ray pool {name}"
            ) from error
        found = cls.__new__(cls)
        found._use(actor, name, is_own=False)
        return found

    def _use(self, actor: Any, name: str, *, is_own: bool) -> None:
        self.name = name
        self.actor = actor
        self._is_own = is_own
        try:
            self._info: PoolInfo = get_result(actor.info.remote(), _ANSWER_S)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """The address at which endpoints dial the registrar."""
        return self._info.address

    @property
    def endpoint_tls(self) -> ClientTlsSource | None:
        """TLS files for dialing the endpoints; None: plain text."""
        return self._info.endpoint_tls

    @property
    def endpoints(self) -> tuple[EndpointRecord, ...]:
        """The registered endpoints, in the order of their first registration.

        Raises:
            EndpointUnreachableError: The cluster's registry does not answer, or is gone.
        """
        found: tuple[EndpointRecord, ...] = call_registry("members", self.fleet)
        return found

    @property
    def fleet(self) -> str:
        """Name of the pool in the cluster's registry."""
        return fleet_name_of_pool(self.name)

    @property
    def client_secret(self) -> str | None:
        """Secret from which ``derive_token`` makes each endpoint's token, by its registry id.

        No endpoint can register with it. None: the pool has no token.
        """
        return self._info.secret

    @property
    def resolver(self) -> FleetResolver:
        """Resolver of the endpoints, present and future; runners get a copy.

        Raises:
            EndpointUnreachableError: No endpoint is registered.
        """
        ids = tuple(record.endpoint_id for record in self.endpoints)
        if not ids:
            raise EndpointUnreachableError(
                f"no endpoint has registered with pool {self.name}; start some ({self.command}), "
                "and wait for them: EnvPool.wait()",
                self.address,
            )
        return FleetResolver(ids, self.fleet, self.client_secret)

    def wait(self, num_endpoints: int = 1, timeout_s: float = 60.0) -> Self:
        """Block until ``num_endpoints`` endpoints have registered; return the pool.

        Raises:
            EndpointTimeoutError: They have not registered in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (num_registered := len(self.endpoints)) < num_endpoints:
            if time.monotonic() > deadline_s:
                raise EndpointTimeoutError(
                    f"{num_registered} of {num_endpoints} endpoints have registered with pool "
                    f"{self.name} in {timeout_s:g} s; start them: {self.command}",
                    self.address,
                )
            threading.Event().wait(_POLL_S)
        return self

    @property
    def command(self) -> str:
        """Command that starts an endpoint on another machine, with placeholders."""
        token = " --pool-token-file FILE" if self._info.secret else ""
        pool = f"{self.name}@{self.address}"
        return f"rlmesh-ray serve-env ENV --address HOST:0 --register {pool}{token}"

    def stop(self) -> None:
        """End the registrar; endpoints go on, and try to register again. Idempotent.

        After ``find`` it does nothing: the pool belongs to the program that started it.
        """
        actor, self.actor = self.actor, None
        if actor is not None and self._is_own:
            stop_actor(actor, _STOP_S)


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What the clients of a pool need to know; see the properties of ``EnvPool``."""

    address: str
    secret: str | None = field(repr=False)
    endpoint_tls: ClientTlsSource | None


@dataclass(slots=True)
class PoolMember:
    """An endpoint of a pool, from its registration on."""

    record: EndpointRecord
    contract: EnvContract
    latest: EnvStatistics | None = None
    """Its last report, until that is published; set in any thread."""
    _metrics: EndpointMetrics | None = None

    def publish(self) -> StatisticsPair | None:
        """Update the metrics with the last report; return this and the former, or None.

        Metrics do not count what the endpoint did before it joined the pool. For one thread.
        """
        latest, self.latest = self.latest, None
        if latest is None:
            return None
        if self._metrics is None:
            since = latest if latest.uptime_s > _YOUNG_S else None
            self._metrics = EndpointMetrics(self.record, since)
        return self._metrics.feed(latest)


@ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"stop": 1})
class PoolActor(ServerActor[Registrar]):
    """Runs the registrar of an ``EnvPool``, and is its ``PoolRegistry``.

    It keeps the pool's endpoints in the cluster's registry, and renews their leases.
    """

    def __init__(
        self,
        pool: str,
        address: str,
        secret: str | None,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
    ) -> None:
        self._pool = pool
        self._secret = secret
        self._info = PoolInfo(address, secret and client_secret(secret, pool), endpoint_tls)
        self._registry = shared_registry()
        self._lock = threading.Lock()
        self._present: dict[str, PoolMember] = {}
        self._stopping = threading.Event()
        super().__init__(
            lambda: Registrar(pool, self, address=address, secret=secret, tls=tls).start()
        )

    def info(self) -> PoolInfo:
        """Return what the clients of the pool need; RlmeshError: the registrar has not started."""
        bound = self._running().address
        return replace(self._info, address=dialable_address(self._info.address, bound))

    def check(self, endpoint_id: str, address: str) -> EnvContract:
        token = self._secret and endpoint_token(self._secret, self._pool, endpoint_id)
        try:
            contract = shake_hands(
                ConnectOptions(address, token, self._info.endpoint_tls, timeout_s=_TIMEOUT_S)
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
            for other_id, other in self._present.items():
                if other_id != endpoint_id:
                    require_same_contract(other.contract, found, address)
                    break  # all others have the same contract
            name, fleet = full_id(self._pool, endpoint_id), fleet_name_of_pool(self._pool)
            incarnation = get_result(
                self._registry.announce.remote(name, address, fleet), _TIMEOUT_S
            )
            record = EndpointRecord(name, incarnation, address, fleet)
            self._present[endpoint_id] = PoolMember(record, found)
            return int(incarnation)

    def remove(self, endpoint_id: str) -> None:
        with self._lock:
            self._withdraw(endpoint_id)

    def note(self, endpoint_id: str, statistics: EnvStatistics) -> None:
        member = self._present.get(endpoint_id)
        if member is not None:
            member.latest = statistics

    @ray.method(concurrency_group="stop")
    def stop(self, grace_s: float = 0.0) -> None:
        """Stop listening, and take all endpoints out of the registry."""
        self._stopping.set()
        super().stop(grace_s)
        with self._lock:
            for endpoint_id in list(self._present):
                self._withdraw(endpoint_id)

    def _withdraw(self, endpoint_id: str) -> None:
        member = self._present.pop(endpoint_id, None)
        if member is not None:
            record = member.record
            withdrawing = self._registry.withdraw.remote(record.endpoint_id, record.incarnation)
            get_result(withdrawing, _TIMEOUT_S)

    def _begin(self) -> None:
        threading.Thread(target=self._renew_periodically, name="renewals", daemon=True).start()

    def _renew_periodically(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            try:
                with self._lock:
                    self._renew(list(self._present.values()))
            except ray.exceptions.RayError as error:
                # Ray restarts the registry before the leases end.
                _LOG.warning("the registry does not answer: %s", str(error).splitlines()[0])

    def _renew(self, members: Sequence[PoolMember]) -> None:
        asked = [
            self._registry.renew.remote(
                each.record.endpoint_id, each.record.incarnation, each.publish()
            )
            for each in members
        ]
        renewed = ray.get(asked, timeout=_TIMEOUT_S)
        # A registry that has restarted has lost them.
        lost = [each for each, is_known in zip(members, renewed, strict=True) if not is_known]
        resumed = [self._registry.resume.remote(each.record) for each in lost]
        ray.get(resumed, timeout=_TIMEOUT_S)
