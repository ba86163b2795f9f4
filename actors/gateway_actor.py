"""The actor behind a Gateway, and how it finds the endpoints of a fleet."""

import logging
from dataclasses import dataclass, field, replace

import ray

from rlmesh_ray.actors.actor_restart import start_server
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.auth.tokens import derive_token
from rlmesh_ray.errors import EndpointUnreachableError, RlmeshError
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.bind_policy import TlsSource, is_wildcard
from rlmesh_ray.server.gateway import GatewayServer
from rlmesh_ray.server.gc_tuning import freeze_heap
from rlmesh_ray.server.health import Health

_ASK_TIMEOUT_S = 10.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndpointQuery:
    """Lists the endpoints of a fleet, by the registry; travels to where the gateway is."""

    fleet: str
    """As the registry knows it."""
    service: str
    """What its endpoints serve."""
    secret: str | None = field(default=None, repr=False)
    """From which the token of each endpoint is derived."""
    token: str | None = field(default=None, repr=False)
    """What all of them want, where there is no ``secret``."""

    def __call__(self) -> tuple[Target, ...]:
        """Return those that take new sessions.

        Raises:
            EndpointUnreachableError: The registry is gone, or restarting.
            EndpointTimeoutError: It does not answer.
        """
        try:
            registry = find_registry()
        except ValueError as error:
            raise EndpointUnreachableError("the registry of endpoints is gone") from error
        records = get_result(registry.members.remote(self.fleet), _ASK_TIMEOUT_S)
        return tuple(map(self._target, records))

    def _target(self, record: EndpointRecord) -> Target:
        token = self.token
        if self.secret is not None:
            token = derive_token(self.secret, record.endpoint_id)
        return Target(record.endpoint_id, record.incarnation, record.address, token)


@ray.remote(num_cpus=0, max_restarts=-1)
class GatewayActor:
    """The actor behind a ``Gateway``; it comes back at its address when Ray restarts it.

    Args:
        listing: Of the fleet.
        address: See ``Gateway``; likewise the others.
    """

    def __init__(
        self,
        listing: EndpointQuery,
        address: str,
        token: TokenSource | None,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
        no_token: bool,
    ) -> None:
        def start() -> GatewayServer:
            files = resolve_client_tls(endpoint_tls)
            server = GatewayServer(
                listing,
                address=address,
                token=token,
                tls=tls,
                no_token=no_token,
                endpoint_credentials=None if files is None else files.credentials,
                service=listing.service,
            ).start()
            freeze_heap()
            return server

        # Kept and raised by the first call, as what it is; see EnvServiceActor.
        self._failure: RlmeshError | None = None
        self._wanted = address
        self._heartbeat: Heartbeat | None = None
        try:
            self._server = start_server(start)
        except RlmeshError as error:
            self._failure = error
            return
        self._heartbeat = self._shown(listing.fleet)

    @ray.method(max_task_retries=-1)
    def address(self) -> str:
        """Return where clients dial it, from other machines if they can reach it.

        Raises:
            RlmeshError: It could not be started.
        """
        server = self._running()
        if not is_wildcard(parse_address(self._wanted)):
            return server.address
        own = parse_address(server.address)
        return str(replace(own, host=ray.util.get_node_ip_address()))

    def health(self) -> Health:
        """Return whether one of the endpoints would serve a new client."""
        return self._running().health()

    @ray.method(max_task_retries=-1)  # one that is just restarting would be shown as lost
    def stop(self) -> None:
        """End all calls; kill the actor afterwards."""
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.end()
        server.stop()

    def _shown(self, fleet: str) -> Heartbeat | None:
        """Let people see the gateway where they look for endpoints; it is in no fleet of theirs."""
        actor_id = ray.get_runtime_context().get_actor_id()
        try:
            return Heartbeat(f"gateway/{actor_id[:8]}", self.address(), fleet=f"gateway/{fleet}")
        except (ValueError, ray.exceptions.RayError) as error:
            # It leads to the endpoints that it knows all the same.
            _LOG.warning("the gateway is not shown by rlmesh-ray status: %s", error)
            return None

    def _running(self) -> GatewayServer:
        if self._failure is not None:
            raise self._failure
        return self._server
