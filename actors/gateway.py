"""Gateway: one stable address for the endpoints of a fleet."""

import secrets
from collections.abc import Mapping
from typing import Any, Protocol, Self

import ray

from rlmesh_ray.actors.gateway_actor import EndpointQuery, GatewayActor
from rlmesh_ray.actors.named_model_fleet import NamedModelFleet
from rlmesh_ray.actors.pool import EnvPool
from rlmesh_ray.actors.ray_calls import get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource, TokenStore
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.server.bind_policy import TlsSource, check_exposure, require_one_of
from rlmesh_ray.server.env_service import SERVICE as ENV_SERVICE
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_service import SERVICE as MODEL_SERVICE

_ASK_TIMEOUT_S = 10.0
# The loss of any other node does not end the cluster.
_HEAD = {"resources": {"node:__internal_head__": 0.001}}
_PLACES = {"resources", "label_selector", "scheduling_strategy"}


class EnvironmentFleet(Protocol):
    """The part of an EnvFleet that a gateway needs."""

    @property
    def resolver(self) -> FleetResolver:
        """Resolver of the endpoints."""


class Gateway:
    """One stable address for the endpoints of a fleet, for programs outside of the cluster.

    The gateway is an actor that forwards every protocol of the endpoints' port, unparsed: each
    connection to one endpoint, the one with the fewest connections. A session on an endpoint that
    ends fails with EndpointLostError; a client that dials the same address again gets another
    endpoint. When the gateway itself dies, Ray restarts it at its address, and all its sessions are
    lost. See ``GatewayServer``. The gateway lives as long as this object or until ``stop``; the
    fleet goes on. Usable as a context manager.

    Args:
        fleet: An EnvFleet, EnvPool or ModelFleet, or the result of ``ModelFleet.find``. A pool may
            be empty: clients then get an error until an endpoint has registered.
        address: The address to listen on, ``HOST:PORT``: one of the gateway's node (``0.0.0.0`` for
            all of them), with a port that no other process uses.
        token: Token that clients must present, or a ``TokenFile`` on the gateway's node; default:
            a new one. The endpoints' own tokens stay within the cluster.
        tls: TLS files for the clients, on the gateway's node.
        no_token: Whether to serve without a token, also where other machines can connect.
        endpoint_tls: TLS files for dialing the endpoints; default: those of the pool, or else
            Ray's, where Ray uses TLS.
        actor_options: Further options of the Ray actor. It runs on the head node, unless these
            have ``resources``, a ``label_selector`` or a ``scheduling_strategy``.
        start_timeout_s: How long to wait until the gateway listens.

    Raises:
        AddressError: ``address`` is malformed, has no fixed port, or is in use.
        ConfigurationError: ``fleet`` is no fleet or pool, or another argument is wrong.
        CapacityError: The cluster did not place the actor in time.
        EndpointUnreachableError: The fleet has been stopped.
    """

    def __init__(  # noqa: PLR0913  # the public surface; every option stands alone
        self,
        fleet: EnvironmentFleet | EnvPool | NamedModelFleet,
        address: str,
        *,
        token: TokenSource | None = None,
        tls: TlsSource | None = None,
        no_token: bool = False,
        endpoint_tls: ClientTlsSource | None = None,
        actor_options: Mapping[str, Any] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        require_one_of(token, no_token=no_token)
        if token is None and not no_token:
            token = secrets.token_urlsafe(32)
        self.token: TokenSource | None = token
        """The token that clients must present; None: none."""
        _check_address(address, token, no_token)
        options = dict(actor_options or {})
        if not _PLACES & options.keys():
            options |= _HEAD
        # DEFAULT: not in the placement group of the caller.
        options = {"scheduling_strategy": "DEFAULT", **options}
        actor_class: Any = GatewayActor
        self.actor = actor_class.options(**options).remote(
            query_for(fleet),
            address,
            token,
            tls,
            endpoint_tls or getattr(fleet, "endpoint_tls", RayTls()),
            no_token,
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
        """End all calls through it and stop listening; the endpoints go on. Idempotent."""
        actor, self.actor = self.actor, None
        if actor is not None:
            stop_actor(actor, _ASK_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def query_for(fleet: object) -> EndpointQuery:
    """Return the registry query for the endpoints of a fleet.

    Raises:
        ConfigurationError: ``fleet`` is no fleet or pool.
    """
    if isinstance(fleet, NamedModelFleet):
        return EndpointQuery(f"model/{fleet.name}", MODEL_SERVICE, token=fleet.token)
    if isinstance(fleet, EnvPool):
        return EndpointQuery(fleet.fleet, ENV_SERVICE, secret=fleet.client_secret)
    resolver = getattr(fleet, "resolver", None)
    if not isinstance(resolver, FleetResolver):
        raise ConfigurationError(
            f"a gateway is for an EnvFleet, EnvPool or ModelFleet, not for {fleet!r:.200}"
        )
    return EndpointQuery(resolver.fleet, ENV_SERVICE, secret=resolver.secret)


def _check_address(address: str, token: TokenSource | None, no_token: bool) -> None:
    parsed = parse_address(address)
    if not no_token:
        check_exposure(parsed, token)
    if isinstance(token, str):  # a file is on the gateway's node, maybe not on this one
        TokenStore(token)
    if not parsed.port:
        raise AddressError(
            f"{address} would be another port after each restart; name HOST:PORT with a port that "
            "no other process uses"
        )
