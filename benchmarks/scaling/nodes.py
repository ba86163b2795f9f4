"""Ray's nodes and the endpoints on them, for as long as a measurement takes."""

import contextlib
import logging
import math
import os
import secrets
import shutil
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlmesh_ray.actors.registry.endpoint_resolver import FleetResolver
from rlmesh_ray.actors.registry.registry_actor import find_registry, shared_registry
from rlmesh_ray.auth.ray_credentials import RayTls
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.server.env.env_server import EnvServer

_LOGICAL_CPUS = 4
"""Of a node: Ray starts as many processes beforehand, and most actors mostly wait."""
ACTOR_CPUS = 0.02
_PROBE_TIMEOUT_S = 5.0


@contextlib.contextmanager
def ray_nodes(num_nodes: int | None, ray_address: str | None) -> Iterator[Cluster | None]:
    """Connect to a cluster: to one of nodes that are processes on this machine, or to another.

    Args:
        num_nodes: To start here; None: ``ray_address`` has its own.
        ray_address: As ``ray.init`` takes it.

    Yields:
        The nodes that were started here; None: none were.

    Raises:
        ConfigurationError: There is no Ray at ``ray_address``.
    """
    if num_nodes is None:
        require_listener(str(ray_address))
        _init(ray_address)
        try:
            yield None
        finally:
            ray.shutdown()
        return
    # No other program's ray.init() may find this one. Names of unix sockets are short.
    folder = os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rs", dir="/tmp")
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": _LOGICAL_CPUS, "include_dashboard": False},
    )
    try:
        for _ in range(num_nodes - 1):
            cluster.add_node(num_cpus=_LOGICAL_CPUS, wait=False)
        cluster.wait_for_nodes(timeout=120.0)
        _init(cluster.address)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def require_listener(address: str) -> None:
    """Find out at once whether anything listens at HOST:PORT; Ray itself tries for minutes.

    Raises:
        ConfigurationError: Nothing does.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdigit()):
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigurationError(
            f"cannot use the Ray at {address}: {error}; give the address that `ray start` printed"
        ) from error


def _init(address: str | None) -> None:
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


@ray.remote
class EndpointHost:
    """Endpoints of one process, which announce themselves under ids.

    Unlike ``EnvServiceActor`` it may have several, and can disable their shared memory.

    Args:
        env: A factory.
        env_kwargs: For it.
        endpoint_ids: One an endpoint.
        fleet: Whose they are.
        token: What clients must show.
        transport: See ``EnvServer``.
    """

    def __init__(
        self,
        env: Callable[..., Any],
        env_kwargs: Mapping[str, object],
        endpoint_ids: Sequence[str],
        fleet: str,
        token: str,
        *,
        transport: str,
    ) -> None:
        self._servers = [
            EnvServer(
                env,
                env_kwargs=env_kwargs,
                address=f"{ray.util.get_node_ip_address()}:0",
                token=token,
                tls=RayTls(),
                transport=transport,
            ).start()
            for _ in endpoint_ids
        ]
        registry = find_registry()
        for endpoint_id, server in zip(endpoint_ids, self._servers, strict=True):
            # Without heartbeats: they last as long as the measurement.
            ray.get(registry.announce.remote(endpoint_id, server.address, fleet, lease_s=math.inf))

    def addresses(self) -> list[str]:
        """Return where clients dial, in the order of the ids."""
        return [server.address for server in self._servers]

    def node_id(self) -> str:
        """Return where it is."""
        return str(ray.get_runtime_context().get_node_id())

    def pid(self) -> int:
        """Return its process."""
        return os.getpid()

    def stop(self) -> None:
        """End the endpoints, and the processes of their lanes."""
        for server in self._servers:
            server.stop(0.0)


class HostedEndpoints:
    """Endpoints of several ``EndpointHost``s. Usable as a context manager.

    Args:
        env: A factory.
        env_kwargs: For it.
        num_hosts: How many actors; spread over the nodes.
        each: How many endpoints each has.
        transport: See ``EnvServer``.
    """

    def __init__(
        self,
        env: Callable[..., Any],
        env_kwargs: Mapping[str, object],
        *,
        num_hosts: int,
        each: int = 1,
        transport: str,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.registry = shared_registry()
        name = secrets.token_hex(4)
        self.endpoint_ids = tuple(f"{name}-{index}" for index in range(num_hosts * each))
        self.resolver = FleetResolver(self.endpoint_ids, name)
        actor_class: Any = EndpointHost
        options = {"num_cpus": ACTOR_CPUS, "scheduling_strategy": "SPREAD"}
        self.actors = [
            actor_class.options(**options).remote(
                env,
                env_kwargs,
                self.endpoint_ids[index * each : (index + 1) * each],
                name,
                self.token,
                transport=transport,
            )
            for index in range(num_hosts)
        ]
        self.addresses: list[str] = []
        try:
            for addresses in ray.get([actor.addresses.remote() for actor in self.actors]):
                self.addresses += addresses
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End them all. Idempotent."""
        actors, self.actors = self.actors, []
        ray.wait([actor.stop.remote() for actor in actors] or [ray.put(None)], timeout=10.0)
        for actor in actors:
            ray.kill(actor)

    def __enter__(self) -> "HostedEndpoints":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def endpoints_by_node(node_ids: Sequence[str]) -> list[int]:
    """Return how many endpoints are on each node that has any, the most first."""
    return sorted(Counter(node_ids).values(), reverse=True)


def beside_me() -> NodeAffinitySchedulingStrategy:
    """Return the strategy that puts an actor on the caller's node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
