"""Bases of the Ray actors that host one server."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import ray

from rlmesh_ray.actors.ray_calls import is_restarted
from rlmesh_ray.actors.registry.heartbeat import Heartbeat
from rlmesh_ray.errors import EndpointClosedError, RlmeshError
from rlmesh_ray.options import Group, Option
from rlmesh_ray.protocol.address import parse_address
from rlmesh_ray.server.endpoint.bind_policy import is_wildcard
from rlmesh_ray.server.endpoint.endpoint import Server
from rlmesh_ray.server.endpoint.endpoint_options import ListenOptions, listening
from rlmesh_ray.server.endpoint.gc_tuning import freeze_heap
from rlmesh_ray.server.endpoint.health import Health
from rlmesh_ray.server.endpoint.log import configure_logging_from_environment
from rlmesh_ray.server.observe.statistics import Statistics

if TYPE_CHECKING:  # an actor loads only the server that it hosts
    from rlmesh_ray.server.env.env_server import EnvServer
    from rlmesh_ray.server.model.model_server import ModelServer

_LOG = logging.getLogger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S = 0.5, 30.0
"""Between attempts to serve again after a restart."""
_SUPERSEDED_GRACE_S = 10.0
"""For the sessions of an endpoint whose id another incarnation has taken."""

ACTOR_ADDRESS = Option(
    "``HOST:PORT``, or ``ListenOptions``. Default: a free port, with a token at the node's own "
    "address, without one on loopback.",
    Group.SERVING,
)
NOT_OF_ACTORS = frozenset({"allow_shutdown", "tls"})
"""Options of a server that an actor does not take: Ray would not notice that a client has stopped
it, and its TLS is Ray's."""


ServerT = TypeVar("ServerT", bound=Server)
EndpointT = TypeVar("EndpointT", bound="EnvServer | ModelServer")


class ServerActor(Generic[ServerT]):
    """Hosts the server that ``serve`` makes and starts, again after a restart by Ray.

    A server that cannot be started is an error of every later call: raised in the constructor, it
    would reach callers as the text of a dead actor. After a restart the actor tries again, with
    growing pauses, until it serves: its former process may still hold the address.
    """

    def __init__(self, serve: Callable[[], ServerT]) -> None:
        self._heartbeat: Heartbeat | None = None
        self._failure: RlmeshError | None = None
        try:
            configure_logging_from_environment()
            self._server = serve()
        except RlmeshError as error:
            self._failure = error
            if is_restarted():
                threading.Thread(target=self._retry, args=[serve], daemon=True).start()
            return
        freeze_heap()
        self._begin()

    @ray.method(max_task_retries=-1)
    def address(self) -> str:
        """Return the address that clients dial.

        Raises:
            RlmeshError: The server could not be started.
        """
        return self._running().address

    def health(self) -> Health:
        """Return whether the server would serve a new client, and why not."""
        return self._running().health()

    # During a restart the call would fail.
    @ray.method(concurrency_group="stop", max_task_retries=-1)
    def stop(self, grace_s: float = 1.0) -> None:
        """End the sessions and stop listening; the caller kills the actor afterwards."""
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.end()
        server.stop(grace_s)

    def _begin(self) -> None:
        """Do what follows when the server serves."""

    def _running(self) -> ServerT:
        if self._failure is not None:
            raise self._failure
        return self._server

    def _retry(self, serve: Callable[[], ServerT]) -> None:
        pause_s = _FIRST_DELAY_S
        while self._failure is not None:
            _LOG.warning("a server cannot serve again yet: %s", self._failure)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_DELAY_S)
            try:
                self._server = serve()
                self._failure = None
            except RlmeshError as error:
                self._failure = error
        freeze_heap()
        self._begin()


class EndpointActor(ServerActor[EndpointT]):
    """Hosts an endpoint of an environment or of a policy, and announces it to the registry.

    For the arguments see ``EnvServiceActor``.
    """

    _leaves_by: Literal["suspend", "retire"] = "retire"
    """The registry's method for an endpoint that drains."""

    def __init__(
        self,
        serve: Callable[[], EndpointT],
        *,
        endpoint_id: str | None,
        fleet: str,
        announces: bool = True,
    ) -> None:
        self._endpoint_id = endpoint_id
        self._fleet = fleet
        self._announces = announces or is_restarted()
        super().__init__(serve)

    @ray.method(max_task_retries=-1)
    def describe(self) -> dict[str, Any]:
        """Return address, node and process id; see ``statistics`` for counters."""
        server = self._running()
        return {
            "address": server.address,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }

    def statistics(self) -> Statistics:
        """Return what the server has counted since its start."""
        return self._running().statistics()

    def announce(self) -> None:
        """Announce the endpoint to the registry, if it has an id; then renew its lease."""
        server = self._running()
        if self._endpoint_id is not None and self._heartbeat is None:
            self._heartbeat = Heartbeat(
                self._endpoint_id,
                server.address,
                fleet=self._fleet,
                statistics=server.statistics,
                on_superseded=self._end_superseded,
            )

    @ray.method(concurrency_group="drain")
    def drain(self, timeout_s: float) -> bool:
        """Accept no new sessions; return whether the open ones have ended within ``timeout_s``.

        New clients get an error that the endpoint is draining; the registry assigns it no session.
        """
        server = self._running()
        if self._heartbeat is not None:
            self._heartbeat.leave(self._leaves_by)
        return server.drain(timeout_s)

    def _begin(self) -> None:
        if self._announces:
            self.announce()

    def _end_superseded(self) -> None:
        # If this process ended, Ray might restart it, and the restarted one take the id back.
        server = self._running()
        self._failure = EndpointClosedError(
            f"endpoint {self._endpoint_id} has been started again elsewhere; look its address up "
            "in the registry",
            server.address,
        )
        server.drain(_SUPERSEDED_GRACE_S)
        server.stop()


def dialable_address(wanted: str, bound: str) -> str:
    """Return a server's address for other machines: its node's, if it listens at all of them.

    ``wanted`` is where the operator has it listen, ``bound`` the server's own address.
    """
    if not is_wildcard(parse_address(wanted)):
        return bound
    return str(replace(parse_address(bound), host=ray.util.get_node_ip_address()))


def actor_listening(
    owner: str, given: Mapping[str, Any], *refused: str
) -> tuple[str, ListenOptions]:
    """Return where an actor listens, and how.

    Without an address it listens at its node's with a token, and on loopback without one. For
    ``owner`` and ``refused`` see ``listening``.
    """
    default = f"{ray.util.get_node_ip_address()}:0" if given.get("token") else "127.0.0.1:0"
    place, listen = listening(owner, given.get("address"), *refused, default=default)
    return place, replace(listen, address=place)
