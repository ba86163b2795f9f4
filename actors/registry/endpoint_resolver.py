"""Looks up endpoints in the registry, from any process: those of one fleet, or the cluster's."""

import contextlib
import functools
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.actors.registry.registry_actor import find_actor, find_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource, derive_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.errors import EndpointError, EndpointTimeoutError, EndpointUnreachableError
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, RunnerStatus

_TIMEOUT_S = 30.0
_MOVE_TIMEOUT_S = 60.0
_CACHED_FOR_S = 30.0
"""How long the registry's handle is cached: a new registry may have replaced a lost one."""
_POOLS = fleet_name_of_pool("")


def owner_name(fleet: str) -> str:
    return f"env-fleet/{fleet}"


@dataclass(frozen=True, slots=True)
class FleetResolver:
    """Looks up a fleet's endpoints in the registry, and assigns sessions to them."""

    endpoint_ids: tuple[str, ...]
    """Endpoints at the time of the plan; the fleet may have other ones since."""
    fleet: str = ""
    """Name of the fleet in the registry."""
    secret: str | None = field(default=None, repr=False)
    """Secret from which each endpoint's token is derived; None: callers have the tokens."""
    reserved: tuple[str, ...] = ()
    """Ids of the endpoints that only evaluation sessions use."""
    is_near: bool = False
    """Whether each endpoint moves to the node of its first runner."""

    def __len__(self) -> int:
        return len(self.endpoint_ids)

    @property
    def tokens(self) -> list[str | None]:
        """Token of each endpoint, by index; None: it has none, or callers have it."""
        return [self._token(each) for each in self.endpoint_ids]

    def address(self, index: int) -> str:
        """Return the present address of endpoint ``index``.

        Raises:
            EndpointUnreachableError: It is not announced, or the registry is gone.
        """
        endpoint_id = self.endpoint_ids[index]
        record = call_registry("lookup", endpoint_id)
        if record is None:
            raise EndpointUnreachableError(
                f"endpoint {endpoint_id} is not announced: it restarts or is gone, or its fleet "
                "has been stopped; start a new fleet then"
            )
        return str(record.address)

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return the endpoint at which a session opens, for the first time or again.

        Args:
            session: Name of the session, unique in the cluster.
            index: Index of the planned endpoint; the session gets another one if that is gone or
                has too many sessions.
            node_id: Node of the session's runner.

        Raises:
            EndpointUnreachableError: No endpoint of the fleet is announced.
        """
        wanted = self.endpoint_ids[index]
        if self.is_near and node_id:
            # A failure costs nothing: the endpoint can be used where it is.
            with contextlib.suppress(ValueError, EndpointError, ray.exceptions.RayError):
                owner = find_actor(owner_name(self.fleet))
                get_result(owner.move_near.remote(wanted, node_id), _MOVE_TIMEOUT_S)
        record = call_registry("assign", self.fleet, session, wanted, node_id, self.reserved)
        if record is None:
            raise EndpointUnreachableError(
                f"no endpoint of the fleet of {wanted} is announced: all of them restart or are "
                "gone, or the fleet has been stopped, or its driver has ended; start a new fleet "
                "then"
            )
        return Assignment(record.address, record.endpoint_id, self._token(record.endpoint_id))

    def _token(self, endpoint_id: str) -> str | None:
        return derive_token(self.secret, endpoint_id) if self.secret else None

    def rebalance(self, placed: Mapping[str, str]) -> Any:
        """Ask which of a runner's sessions have to move; return the reference of their names.

        ``placed`` has their endpoint ids. EndpointUnreachableError: the registry is gone.
        """
        return _call("rebalance", self.fleet, dict(placed), self.reserved)

    def release(self, sessions: Iterable[str]) -> None:
        """End the assignments of closed sessions. Neither waits nor raises."""
        with contextlib.suppress(EndpointUnreachableError):
            _call("release", self.fleet, tuple(sessions))


def call_registry(method: str, *arguments: object) -> Any:
    """Call a method of the registry; return its answer.

    Raises:
        EndpointUnreachableError: The registry is gone, or does not answer.
    """
    try:
        try:
            return get_result(_call(method, *arguments), _TIMEOUT_S)
        except EndpointUnreachableError:
            _cached_registry.cache_clear()
            return get_result(_call(method, *arguments), _TIMEOUT_S)
    except EndpointTimeoutError as error:
        raise EndpointUnreachableError("the registry of endpoints does not answer") from error


def _call(method: str, *arguments: object) -> Any:
    try:
        # Where Ray has been shut down, a look-up of an actor would start another Ray.
        if not ray.is_initialized():
            raise ValueError("this process is not connected to Ray")
        context = ray.get_runtime_context()
        period = int(time.monotonic() / _CACHED_FOR_S)
        registry = _cached_registry(context.get_node_id(), context.get_job_id(), period)
        return getattr(registry, method).remote(*arguments)
    except (ValueError, ray.exceptions.RayError) as error:
        raise EndpointUnreachableError(
            "the registry of endpoints is gone, and the fleets with it; start a new fleet"
        ) from error


@functools.lru_cache(maxsize=1)
def _cached_registry(node_id: str, job_id: str, period: int) -> Any:
    return find_registry()  # which is slow: once per connection to Ray and period


def cluster_endpoints() -> list[EndpointStatus]:
    """Return the registry's endpoints, also stale ones; EndpointError: it does not answer."""
    return _ask_registry("overview")


def _ask_registry(question: str) -> list[Any]:
    """Return what the registry lists, with the addresses of nodes; nothing without a registry."""
    try:
        registry = find_registry()
    except ValueError:
        return []
    found = get_result(getattr(registry, question).remote(), _TIMEOUT_S)
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [replace(each, node=names.get(each.node, each.node)) for each in found]


class ClusterEndpoints:
    """The endpoints of some fleets and pools, or of all, and how to connect to them.

    ``token`` is for endpoints that belong to neither a fleet nor a pool. Without ``tls`` Ray's TLS
    files are used. Each method raises EndpointError if the registry, or an endpoint's fleet or
    pool, does not answer.
    """

    def __init__(
        self,
        title: str,
        fleets: Collection[str] = (),
        token: TokenSource | None = None,
        tls: ClientTlsSource | None = None,
    ) -> None:
        self.title = title
        self._fleets = {each for name in fleets for each in (name, fleet_name_of_pool(name))}
        self._token = token
        self._tls = tls
        self._known: dict[str, ConnectOptions] = {}

    def endpoints(self) -> list[EndpointStatus]:
        found = cluster_endpoints()
        present = {each.endpoint_id for each in found}
        self._known = {name: each for name, each in self._known.items() if name in present}
        return [each for each in found if not self._fleets or each.fleet in self._fleets]

    def runners(self) -> list[RunnerStatus]:
        found = _ask_registry("runners")
        return [each for each in found if not self._fleets or each.fleet in self._fleets]

    def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        known = self._known.get(endpoint.endpoint_id)
        if known is None or known.address != endpoint.address:
            token, tls = self._credentials(endpoint)
            known = ConnectOptions(endpoint.address, token, tls)
            self._known[endpoint.endpoint_id] = known
        return known

    def _credentials(
        self, endpoint: EndpointStatus
    ) -> tuple[TokenSource | None, ClientTlsSource | None]:
        tls = self._tls or RayTls()
        try:
            if endpoint.fleet.startswith(_POOLS):
                info = get_result(find_actor(endpoint.fleet).info.remote(), _TIMEOUT_S)
                secret = info.secret
                return secret and derive_token(secret, endpoint.endpoint_id), info.endpoint_tls
            owner = find_actor(owner_name(endpoint.fleet))
            return get_result(owner.token.remote(endpoint.endpoint_id), _TIMEOUT_S), tls
        except ValueError:  # it has no such actor: it was started alone
            return self._token, tls
