"""The endpoints of the cluster's registry, for programs that show and observe them."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import ray

from rlmesh_ray.actors.endpoint_owner import find_endpoint_owner
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, find_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource, derive_token
from rlmesh_ray.client.channel import ConnectOptions
from rlmesh_ray.protocol.pool_membership import fleet_name_of_pool
from rlmesh_ray.server.observe.endpoint_status import EndpointStatus, RunnerStatus

_TIMEOUT_S = 30.0
_POOLS = fleet_name_of_pool("")

StatusT = TypeVar("StatusT", EndpointStatus, RunnerStatus)


def cluster_endpoints() -> list[EndpointStatus]:
    """Return the registry's endpoints, also stale ones; none where there is no registry.

    Raises:
        EndpointError: The registry does not answer.
    """
    return _with_node_names(_ask_registry("overview"))


def _ask_registry(question: str) -> Sequence[Any]:
    """Return the registry's answer; nothing where there is no registry."""
    try:
        registry = find_registry()
    except ValueError:
        return ()
    answer: Sequence[Any] = get_result(getattr(registry, question).remote(), _TIMEOUT_S)
    return answer


def _with_node_names(found: Sequence[StatusT]) -> list[StatusT]:
    names = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return [replace(each, node=names.get(each.node, each.node)) for each in found]


class ClusterEndpoints:
    """The endpoints of some fleets and pools, or of all, and how to connect to them.

    Args:
        title: Names the cluster for people.
        fleets: Names of fleets and pools; none: all.
        token: Token for endpoints that belong to neither a fleet nor a pool.
        tls: TLS files for the endpoints; default: those of Ray, if it uses TLS.
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
        """Return the env runners that use them.

        Raises:
            EndpointError: The registry does not answer.
        """
        found: list[RunnerStatus] = _with_node_names(_ask_registry("runners"))
        return [each for each in found if not self._fleets or each.fleet in self._fleets]

    def connect_options(self, endpoint: EndpointStatus) -> ConnectOptions:
        """Return how to connect to an endpoint, with the token that its fleet or pool has for it.

        Raises:
            EndpointError: The fleet or the pool does not answer.
        """
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
                pool = ray.get_actor(endpoint.fleet, namespace=REGISTRY_NAMESPACE)
                info = get_result(pool.info.remote(), _TIMEOUT_S)
                secret = info.secret
                return secret and derive_token(secret, endpoint.endpoint_id), info.endpoint_tls
            owner = find_endpoint_owner(endpoint.fleet)
            return get_result(owner.token.remote(endpoint.endpoint_id), _TIMEOUT_S), tls
        except ValueError:  # it has no such actor: it was started alone
            return self._token, tls
