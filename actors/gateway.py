"""Gateway: one stable address for the endpoints of a fleet."""

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.env_fleet import EnvFleet
from rlmesh_ray.actors.model_fleet import NamedModelFleet
from rlmesh_ray.actors.placement import ON_HEAD, OUTSIDE, PLACES
from rlmesh_ray.actors.pool import EnvPool
from rlmesh_ray.actors.ray_calls import StoppedAtExit, get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import call_registry
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.actors.server_actor import ServerActor, dialable_address
from rlmesh_ray.auth.client_tls import ClientTlsSource, resolve_client_tls
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import (
    ServerToken,
    TokenFile,
    TokenSource,
    client_token_of,
    derive_token,
    token_store,
)
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.options import takes_no_more
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.protocol.gateway_balancer import Target
from rlmesh_ray.server.endpoint.bind_policy import TlsSource, check_exposure
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.server.env.env_service import SERVICE as ENV_SERVICE
from rlmesh_ray.server.model.model_service import SERVICE as MODEL_SERVICE
from rlmesh_ray.server.pool.gateway import GatewayServer

_ASK_TIMEOUT_S = 10.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EndpointQuery:
    """Finds the endpoints of a fleet that accept new sessions; runs in the gateway's process."""

    fleet: str
    """Name of the fleet in the registry."""
    service: str
    """Full name of the gRPC service of the endpoints."""
    secret: str | None = field(default=None, repr=False)
    """Secret from which the token of each endpoint is derived."""
    token: TokenSource | None = field(default=None, repr=False)
    """Token of all endpoints; None: each has its own, which ``secret`` derives, or none."""

    def __call__(self) -> tuple[Target, ...]:
        token = None if self.token is None else client_token_of(self.token)
        return tuple(
            Target(
                each.endpoint_id,
                each.incarnation,
                each.address,
                token if self.secret is None else derive_token(self.secret, each.endpoint_id),
            )
            for each in call_registry("members", self.fleet)
        )


class Gateway(StoppedAtExit):
    """One stable address for the endpoints of a fleet, for programs outside of the cluster.

    The gateway is an actor that forwards every protocol of the endpoints' port, unparsed: each
    connection to one endpoint, the one with the fewest connections. A session on an endpoint that
    ends fails with EndpointLostError; a client that dials the same address again gets another
    endpoint. When the gateway itself dies, Ray restarts it at its address, and all its sessions are
    lost. The gateway lives as long as this object or until ``stop``; the fleet continues. Usable as
    a context manager.

    An agent that joins a dm_env_rpc world by a connection of its own may reach another endpoint:
    worlds of several agents need a single endpoint behind the gateway.

    Args:
        fleet: An EnvFleet, EnvPool or ModelFleet, or the result of ``ModelFleet.find``. A pool may
            be empty: clients then get an error until an endpoint has registered.
        address: The address to listen on, ``HOST:PORT``: one of the gateway's node (``0.0.0.0`` for
            all of them), with a port that no other process uses.
        token: Token that clients must present, or a ``TokenFile`` on the gateway's node; default:
            a new one. False: none on purpose, also where other machines can connect. The endpoints'
            own tokens stay within the cluster.
        tls: TLS files for the clients, on the gateway's node.
        endpoint_tls: TLS files for dialing the endpoints; default: those of the pool, or else
            Ray's, where Ray uses TLS.
        actor_options: Further options of the Ray actor. It runs on the head node, unless these
            have ``resources``, a ``label_selector`` or a ``scheduling_strategy``.
        start_timeout_s: How long to wait until the gateway listens.

    Raises:
        AddressError: ``address`` is malformed, has no fixed port, or is in use.
        ConfigurationError: ``fleet`` is not a fleet or pool, or another argument is wrong.
        CapacityError: The cluster did not place the actor in time.
        EndpointUnreachableError: The fleet has been stopped.
    """

    @takes_no_more(no_token="give token=False")
    def __init__(
        self,
        fleet: EnvFleet | EnvPool | NamedModelFleet,
        address: str,
        *,
        token: ServerToken = None,
        tls: TlsSource | None = None,
        endpoint_tls: ClientTlsSource | None = None,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        if token is None:
            token = secrets.token_urlsafe(32)
        self.token: TokenSource | None = None if token is False else token
        """The token that clients must present; None: none."""
        _check_address(address, token)
        given = actor_options or {}
        options = {**(OUTSIDE if PLACES & given.keys() else ON_HEAD), **given}
        actor_class: Any = GatewayActor
        self.actor = actor_class.options(**options).remote(
            query_for(fleet),
            address,
            token,
            tls,
            endpoint_tls or getattr(fleet, "endpoint_tls", RayTls()),
        )
        """None after ``stop``."""
        starting = self.actor.address.remote()
        try:
            if not ray.wait([starting], timeout=start_timeout_s)[0]:
                raise CapacityError(
                    f"the gateway did not start in {start_timeout_s:g} s: no node that "
                    "actor_options allow (by default the head node) has room for it"
                )
            self._address = str(get_result(starting))
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """The address that clients dial; it never changes."""
        return self._address

    def health(self) -> Health:
        """Return whether one of the endpoints would serve a new client.

        Raises:
            EndpointUnreachableError: The gateway is restarting, or has been stopped.
        """
        if self.actor is None:
            raise EndpointUnreachableError("the gateway has been stopped", self._address)
        found: Health = get_result(self.actor.health.remote(), _ASK_TIMEOUT_S)
        return found

    def stop(self) -> None:
        """End all calls through it and stop listening; the endpoints continue. Idempotent."""
        actor, self.actor = self.actor, None
        if actor is not None:
            stop_actor(actor, _ASK_TIMEOUT_S)


def query_for(fleet: object) -> EndpointQuery:
    if isinstance(fleet, NamedModelFleet):
        return EndpointQuery(f"model/{fleet.name}", MODEL_SERVICE, token=fleet.token)
    if isinstance(fleet, EnvPool):
        return EndpointQuery(fleet.fleet, ENV_SERVICE, secret=fleet.client_secret)
    if isinstance(fleet, EnvFleet):
        return EndpointQuery(fleet.resolver.fleet, ENV_SERVICE, secret=fleet.resolver.secret)
    raise ConfigurationError(
        f"a gateway is for an EnvFleet, EnvPool or ModelFleet, not for {fleet!r:.200}"
    )


def _check_address(address: str, token: ServerToken) -> None:
    parsed = parse_address(address)
    check_exposure(parsed, token)
    if not isinstance(token, TokenFile):  # that is on the gateway's node, maybe not on this one
        token_store(token)
    if not parsed.port:
        raise AddressError(
            f"{address} would be another port after each restart; name HOST:PORT with a port that "
            "no other process uses"
        )


@ray.remote(num_cpus=0, max_restarts=-1, concurrency_groups={"stop": 1})
class GatewayActor(ServerActor[GatewayServer]):
    """The actor behind a ``Gateway``; after a restart it listens at its former address."""

    def __init__(
        self,
        query: EndpointQuery,
        address: str,
        token: ServerToken,
        tls: TlsSource | None,
        endpoint_tls: ClientTlsSource | None,
    ) -> None:
        def serve() -> GatewayServer:
            files = resolve_client_tls(endpoint_tls)
            return GatewayServer(
                query,
                address=address,
                token=token,
                tls=tls,
                endpoint_credentials=None if files is None else files.credentials,
                service=query.service,
            ).start()

        self._wanted = address
        self._fleet = f"gateway/{query.fleet}"
        self._id = f"gateway/{ray.get_runtime_context().get_actor_id()[:8]}"
        super().__init__(serve)

    @ray.method(max_task_retries=-1)
    def address(self) -> str:
        return dialable_address(self._wanted, self._running().address)

    def _begin(self) -> None:
        """Announce the gateway to the registry for ``rlmesh-ray status``, in its own fleet."""
        try:
            self._heartbeat = Heartbeat(self._id, self.address(), fleet=self._fleet)
        except (ValueError, ray.exceptions.RayError) as error:
            # It forwards to the endpoints all the same.
            _LOG.warning("rlmesh-ray status does not show the gateway: %s", error)
