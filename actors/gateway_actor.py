"""GatewayActor: the actor behind a Gateway, and its query for the endpoints of a fleet."""

import logging
from dataclasses import dataclass, field, replace

import ray

from rlmesh_ray.actors.actor_restart import start_server
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.token_file import TokenSource, client_token_of
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
    """Registry query for the endpoints of a fleet; runs in the gateway's process."""

    fleet: str
    """Name of the fleet in the registry."""
    service: str
    """Full name of the gRPC service of the endpoints."""
    secret: str | None = field(default=None, repr=False)
    """Secret from which the token of each endpoint is derived."""
    token: TokenSource | None = field(default=None, repr=False)
    """Token of all endpoints, where there is no ``secret``."""

    def __call__(self) -> tuple[Target, ...]:
        """Return the endpoints that accept new sessions.

        Raises:
            EndpointUnreachableError: The registry is gone, or restarting.
            EndpointTimeoutError: The registry does not answer.
        """
        try:
            registry = find_registry()
        except ValueError as error:
            raise EndpointUnreachableError("the registry of endpoints is gone") from error
        records = get_result(registry.members.remote(self.fleet), _ASK_TIMEOUT_S)
        return tuple(map(self._target, records))

    def _target(self, record: EndpointRecord) -> Target:
        token = None if self.token is None else client_token_of(self.token)
        if self.secret is not None:
            token = derive_token(self.secret, record.endpoint_id)
        return Target(record.endpoint_id, record.incarnation, record.address, token)


@ray.remote(num_cpus=0, max_restarts=-1)
class GatewayActor:
    """The actor behind a ``Gateway``; after a restart it listens at its former address.

    Args:
        query: Returns the endpoints of the fleet.
        address: See ``Gateway``; likewise the others.
    """

    def __init__(
        self,
        query: EndpointQuery,
        address: str,
        token: TokenSource | None,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
        no_token: bool,
    ) -> None:
        def start() -> GatewayServer:
            files = resolve_client_tls(endpoint_tls)
            server = GatewayServer(
                query,
                address=address,
                token=token,
                tls=tls,
                no_token=no_token,
                endpoint_credentials=None if files is None else files.credentials,
                service=query.service,
            ).start()
            freeze_heap()
            return server

        # Raised by the first call, with its own class; see ServerActor.
        self._failure: RlmeshError | None = None
        self._wanted = address
        self._heartbeat: Heartbeat | None = None
        try:
            self._server = start_server(start)
        except RlmeshError as error:
            self._failure = error
            return
        self._heartbeat = self._announced(query.fleet)

    @ray.method(max_task_retries=-1)
    def address(self) -> str:
        """Return the address that clients dial, from other machines where those can connect.

        Raises:
            RlmeshError: The gateway could not be started.
        """
        server = self._running()
        if not is_wildcard(parse_address(self._wanted)):
            return server.address
        own = parse_address(server.address)
        return str(replace(own, host=ray.util.get_node_ip_address()))

    def health(self) -> Health:
        """Return whether one of the endpoints would serve a new client."""
        return self._running().health()

    @ray.method(max_task_retries=-1)  # during a restart the call would fail
    def stop(self) -> None:
        """End all calls; the caller kills the actor afterwards."""
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.end()
        server.stop()

    def _announced(self, fleet: str) -> Heartbeat | None:
        """Announce the gateway to the registry for ``rlmesh-ray status``, in a fleet of its own."""
        actor_id = ray.get_runtime_context().get_actor_id()
        try:
            return Heartbeat(f"gateway/{actor_id[:8]}", self.address(), fleet=f"gateway/{fleet}")
        except (ValueError, ray.exceptions.RayError) as error:
            # It forwards to the endpoints all the same.
            _LOG.warning("rlmesh-ray status does not show the gateway: %s", error)
            return None

    def _running(self) -> GatewayServer:
        if self._failure is not None:
            raise self._failure
        return self._server
