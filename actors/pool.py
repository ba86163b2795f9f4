"""EnvPool: endpoints outside of Ray that register themselves."""

import threading
import time
from types import TracebackType
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.pool_actor import PoolActor, PoolInfo
from rlmesh_ray.actors.ray_calls import get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver, call_registry
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource, client_token_of
from rlmesh_ray.auth.tokens import derive_token
from rlmesh_ray.errors import (
    ConfigurationError,
    EndpointTimeoutError,
    EndpointUnreachableError,
)
from rlmesh_ray.protocol.pool_membership import checked_name, fleet_name_of_pool
from rlmesh_ray.server.bind_policy import TlsSource

_POLL_S = 0.2
_ANSWER_S = 30.0
_STOP_S = 10.0


class EnvPool:
    """Endpoints that nobody lists: they register themselves, come and go while training runs.

    The pool's registrar listens on this node. An endpoint needs no Ray, and dials it:

        rlmesh-ray serve-env my:Game-v0 --address HOST:0 \
            --register games@REGISTRAR:7070 --pool-token-file FILE

    The pool looks at each endpoint before it is in: it must be reachable at the address that it
    tells, and serve the same spaces at the same width as those that are in the pool already. As
    long as its connection to the registrar lives, it is in the pool; when it comes back, wherever
    that is, sessions find it there. The registrar itself restarts at its address if it has a fixed
    port, and sessions go on meanwhile.

    The pool lives as long as this object or until ``stop``. Make it on the driver. Usable as a
    context manager.

    Args:
        name: Of the pool, which no other pool of the cluster has.
        address: Where the registrar listens, ``HOST:PORT``.
        token: What the pool and its endpoints have in common, or a ``TokenFile`` with it; required
            unless ``address`` is loopback. It does not travel: from it is derived what endpoints
            show to the registrar, and what clients show to each endpoint.
        tls: Files for TLS, of the registrar.
        endpoint_tls: How to dial endpoints that speak TLS: all of them.

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
        shared_registry()
        actor_class: Any = PoolActor
        try:
            actor = actor_class.options(
                name=fleet_name_of_pool(name),
                namespace=REGISTRY_NAMESPACE,
                # Where the address is.
                scheduling_strategy=NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
            ).remote(name, address, secret, tls, endpoint_tls)
        except ValueError as error:
            raise ConfigurationError(
                f"the cluster has a pool {name!r} already; use it (EnvPool.find({name!r})), or "
                "give this one another name"
            ) from error
        self._is_own = True
        self._use(actor, name)

    @classmethod
    def find(cls, name: str) -> Self:
        """Return the pool of that name, which somebody else has started and will stop.

        Raises:
            ConfigurationError: The cluster has none.
        """
        try:
            actor = ray.get_actor(
                fleet_name_of_pool(checked_name(name, "name")), REGISTRY_NAMESPACE
            )
        except ValueError as error:
            raise ConfigurationError(
                f"the cluster has no pool {name!r}; start it: rlmesh-ray pool {name}"
            ) from error
        found = cls.__new__(cls)
        found._is_own = False
        found._use(actor, name)
        return found

    def _use(self, actor: Any, name: str) -> None:
        self.name = name
        self._actor = actor
        try:
            self._info: PoolInfo = get_result(actor.info.remote(), _ANSWER_S)
        except BaseException:
            self.stop()
            raise

    @property
    def address(self) -> str:
        """Where endpoints dial the registrar."""
        return self._info.address

    @property
    def endpoint_tls(self) -> ClientTlsSource | None:
        """How its endpoints are dialed."""
        return self._info.endpoint_tls

    @property
    def endpoints(self) -> tuple[EndpointRecord, ...]:
        """Those that are there now, in the order in which they came first.

        Raises:
            EndpointUnreachableError: The registry of the cluster does not answer, or is gone.
        """
        found: tuple[EndpointRecord, ...] = call_registry("members", self.fleet)
        return found

    @property
    def fleet(self) -> str:
        """What the cluster's registry calls it."""
        return fleet_name_of_pool(self.name)

    @property
    def client_secret(self) -> str | None:
        """From which ``derive_token`` makes the token of each endpoint, by its id in the registry.

        It registers nobody. None: the pool has no token.
        """
        return self._info.secret

    @property
    def resolver(self) -> FleetResolver:
        """How runners find its endpoints: those that are there now, and others later.

        Raises:
            EndpointUnreachableError: There is none now.
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
        """Block until so many endpoints are there; return the pool.

        Raises:
            EndpointTimeoutError: They have not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (num_there := len(self.endpoints)) < num_endpoints:
            if time.monotonic() > deadline_s:
                raise EndpointTimeoutError(
                    f"{num_there} of {num_endpoints} endpoints have registered with pool "
                    f"{self.name} in {timeout_s:g} s; start them: {self.command}",
                    self.address,
                )
            threading.Event().wait(_POLL_S)
        return self

    @property
    def command(self) -> str:
        """What starts an endpoint on another machine, in outline."""
        token = " --pool-token-file FILE" if self._info.secret else ""
        pool = f"{self.name}@{self.address}"
        return f"rlmesh-ray serve-env ENV --address HOST:0 --register {pool}{token}"

    def stop(self) -> None:
        """End the registrar; endpoints go on, and try to come back. Idempotent.

        A pool that was found is somebody else's, and goes on.
        """
        actor, self._actor = self._actor, None
        if actor is not None and self._is_own:
            stop_actor(actor, _STOP_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def tokens_of(resolver: FleetResolver) -> list[str | None]:
    """Return what the endpoints of a pool want to see, in the order of its directory."""
    secret = resolver.secret
    return [secret and derive_token(secret, each) for each in resolver.endpoint_ids]
