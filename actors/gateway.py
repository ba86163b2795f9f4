"""Gateway: one stable address for the endpoints of a fleet, wherever they are and restart."""

import secrets
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

import ray

from rlmesh_ray.actors.gateway_actor import EndpointQuery, GatewayActor
from rlmesh_ray.actors.named_model_fleet import NamedModelFleet
from rlmesh_ray.actors.pool import EnvPool
from rlmesh_ray.actors.ray_calls import get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.auth.token_file import TokenSource
from rlmesh_ray.auth.token_store import TokenStore
from rlmesh_ray.errors import (
    AddressError,
    CapacityError,
    ConfigurationError,
    EndpointUnreachableError,
)
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.server.bind_policy import TlsSource, check_exposure
from rlmesh_ray.server.env_service import SERVICE as ENV_SERVICE
from rlmesh_ray.server.health import Health
from rlmesh_ray.server.model_service import SERVICE as MODEL_SERVICE

_ASK_TIMEOUT_S = 10.0
# Any other node can be lost without the cluster.
_HEAD = {"resources": {"node:__internal_head__": 0.001}}
_PLACES = {"resources", "label_selector", "scheduling_strategy"}


class EnvironmentFleet(Protocol):
    """What an EnvFleet is to a gateway."""

    @property
    def resolver(self) -> FleetResolver:
        """Where its endpoints are."""


class Gateway:
    """One address for the endpoints of a fleet: external programs dial it, whatever restarts.

    It is an actor that forwards every protocol of the endpoints' port, unparsed: each connection
    to one endpoint, the one with the fewest. A session on an endpoint that goes ends with
    EndpointLostError; who dials the same address again gets another endpoint. When the gateway
    itself dies, Ray restarts it at its address, and all its sessions are lost. See
    ``GatewayServer``. It lives as long as this object or until ``stop``; the fleet goes on. Usable
    as a context manager.

    Args:
        fleet: An EnvFleet, EnvPool or ModelFleet, or one that ``ModelFleet.find`` has found. A pool
            may be empty: clients are told so until somebody has registered.
        address: Where to listen, ``HOST:PORT``: an address of the gateway's node (``0.0.0.0`` for
            all of them), and a port that is never another process's.
        token: What clients must show, or a ``TokenFile`` on the gateway's node; default: a new
            one. The endpoints' own tokens stay within the cluster.
        tls: Files for TLS with the clients, on the gateway's node.
        no_token: Do without a token, also where other machines can reach it.
        endpoint_tls: How to dial endpoints that speak TLS; default: as the pool says, or else with
            the files that Ray uses, where it uses TLS.
        actor_options: More options of the Ray actor. It runs on the head node, unless these have
            ``resources``, a ``label_selector`` or a ``scheduling_strategy``.
        start_timeout_s: How long to wait until it listens.

    Raises:
        AddressError: ``address`` is malformed, has no fixed port, or is in use.
        ConfigurationError: ``fleet`` is none, or another argument is wrong.
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
        if token is None and not no_token:
            token = secrets.token_urlsafe(32)
        self.token: TokenSource | None = token
        """What clients must show; None: nothing."""
        _check_address(address, token, no_token)
        options = dict(actor_options or {})
        if not _PLACES & options.keys():
            options |= _HEAD
        # DEFAULT: not into the placement group of whoever happens to call this.
        options = {"scheduling_strategy": "DEFAULT", **options}
        actor_class: Any = GatewayActor
        self._actor = actor_class.options(**options).remote(
            query_for(fleet),
            address,
            token,
            tls,
            endpoint_tls or getattr(fleet, "endpoint_tls", RayTls()),
            no_token,
        )
        starting = self._actor.address.remote()
        try:
            if not ray.wait([starting], timeout=start_timeout_s)[0]:
                raise CapacityError(
                    f"the gateway did not start in {start_timeout_s:g} s: no node that "
                    "actor_options allow (the head node, if they say nothing) has room for it"
                )
            self._address = str(get_result(starting))
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Where clients dial it; the same for as long as it lives."""
        return self._address

    def health(self) -> Health:
        """Tell whether one of the endpoints would serve a new client.

        Raises:
            EndpointUnreachableError: The gateway is restarting, or has been stopped.
        """
        if self._actor is None:
            raise EndpointUnreachableError("the gateway has been stopped", self._address)
        found: Health = get_result(self._actor.health.remote(), _ASK_TIMEOUT_S)
        return found

    def stop(self) -> None:
        """End all calls through it and stop listening; the endpoints go on. Idempotent."""
        actor, self._actor = self._actor, None
        if actor is not None:
            stop_actor(actor, _ASK_TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def query_for(fleet: object) -> EndpointQuery:
    """Return how to list the endpoints of a fleet.

    Raises:
        ConfigurationError: It is none, or has been stopped.
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
    if isinstance(token, str):  # a file lies on the gateway's node, and need not lie here
        TokenStore(token)
    if not parsed.port:
        raise AddressError(
            f"{address} would be another port after each restart; name HOST:PORT with a port that "
            "is nobody else's"
        )
