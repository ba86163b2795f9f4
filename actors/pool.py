"""EnvPool: endpoints outside of Ray that register themselves."""

import threading
import time
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.pool_actor import PoolActor, PoolInfo
from rlmesh_ray.actors.ray_calls import get_result, stop_actor
from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver, call_registry
from rlmesh_ray.actors.registry.lease_table import EndpointRecord
from rlmesh_ray.actors.registry.registry_actor import REGISTRY_NAMESPACE, shared_registry
from rlmesh_ray.auth.client_tls import ClientTlsSource
from rlmesh_ray.auth.token_file import TokenSource, client_token_of, derive_token
from rlmesh_ray.errors import ConfigurationError, EndpointTimeoutError, EndpointUnreachableError
from rlmesh_ray.protocol.pool_membership import checked_name, fleet_name_of_pool
from rlmesh_ray.server.bind_policy import TlsSource

_POLL_S = 0.2
_ANSWER_S = 30.0
_STOP_S = 10.0


class EnvPool:
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
        self._is_own = True
        self._use(actor, name)

    @classmethod
    def find(cls, name: str) -> Self:
        """Return the pool of that name, which another program has started and will stop.

        Raises:
            ConfigurationError: ``name`` is malformed.
            EndpointUnreachableError: The cluster has no pool of that name.
        """
        try:
            actor = ray.get_actor(
                fleet_name_of_pool(checked_name(name, "name")), REGISTRY_NAMESPACE
            )
        except ValueError as error:
            raise EndpointUnreachableError(
                f"the cluster has no pool {name!r}; start it: rlmesh-ray pool {name}"
            ) from error
        found = cls.__new__(cls)
        found._is_own = False
        found._use(actor, name)
        return found

    def _use(self, actor: Any, name: str) -> None:
        self.name = name
        self.actor = actor
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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def tokens_of(resolver: FleetResolver) -> list[str | None]:
    """Return the token of each endpoint of a pool, in the order of its resolver."""
    secret = resolver.secret
    return [secret and derive_token(secret, each) for each in resolver.endpoint_ids]
