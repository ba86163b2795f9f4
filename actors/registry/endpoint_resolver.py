"""FleetResolver: looks up a fleet's endpoints in the registry, from any process."""

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.endpoint_owner import find_endpoint_owner
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.assignment_table import Assignment
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.auth.token_file import derive_token
from rlmesh_ray.errors import EndpointError, EndpointTimeoutError, EndpointUnreachableError

_TIMEOUT_S = 30.0
_MOVE_TIMEOUT_S = 60.0
_CACHED_FOR_S = 30.0
"""How long the registry's handle is cached: a new registry may have replaced a lost one."""


@dataclass(frozen=True, slots=True)
class FleetResolver:
    """Looks up a fleet's endpoints in the registry, and assigns sessions to them."""

    endpoint_ids: tuple[str, ...]
    """Endpoints at the time of the plan; the fleet may have other ones since."""
    fleet: str = ""
    """Name of the fleet in the registry."""
    secret: str | None = field(default=None, repr=False)
    """Secret from which each endpoint's token is derived; None: callers have the tokens."""
    reserved: tuple[str, ...] = ()
    """Ids of the endpoints that only evaluation sessions use."""
    is_near: bool = False
    """Whether each endpoint moves to the node of its first runner."""

    def __len__(self) -> int:
        return len(self.endpoint_ids)

    def address(self, index: int) -> str:
        """Return the present address of endpoint ``index``.

        Raises:
            EndpointUnreachableError: It is not announced, or the registry is gone.
        """
        endpoint_id = self.endpoint_ids[index]
        record = call_registry("lookup", endpoint_id)
        if record is None:
            raise EndpointUnreachableError(
                f"endpoint {endpoint_id} is not announced: it restarts or is gone, or its fleet "
                "has been stopped; start a new fleet then"
            )
        return str(record.address)

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return the endpoint at which a session opens, for the first time or again.

        Args:
            session: Name of the session, unique in the cluster.
            index: Index of the planned endpoint; the session gets another one if that is gone or
                has too many sessions.
            node_id: Node of the session's runner.

        Raises:
            EndpointUnreachableError: No endpoint of the fleet is announced.
        """
        wanted = self.endpoint_ids[index]
        if self.is_near and node_id:
            self._move_near(wanted, node_id)
        record = call_registry("assign", self.fleet, session, wanted, node_id, self.reserved)
        if record is None:
            raise EndpointUnreachableError(
                f"no endpoint of the fleet of {wanted} is announced: all of them restart or are "
                "gone, or the fleet has been stopped, or its driver has ended; start a new fleet "
                "then"
            )
        token = derive_token(self.secret, record.endpoint_id) if self.secret else None
        return Assignment(record.address, record.endpoint_id, token)

    def _move_near(self, endpoint_id: str, node_id: str) -> None:
        # A failure costs nothing: the endpoint can be used where it is.
        with contextlib.suppress(ValueError, EndpointError, ray.exceptions.RayError):
            get_result(
                find_endpoint_owner(self.fleet).move_near.remote(endpoint_id, node_id),
                _MOVE_TIMEOUT_S,
            )

    def rebalance(self, placed: Mapping[str, str]) -> Any:
        """Ask the registry which sessions have to move; does not wait for the answer.

        Args:
            placed: Endpoint id of each session of a runner.

        Returns:
            An object reference to a tuple of session names.

        Raises:
            EndpointUnreachableError: The registry is gone.
        """
        return _call("rebalance", self.fleet, dict(placed), self.reserved)

    def release(self, sessions: Iterable[str]) -> None:
        """End the assignments of closed sessions. Neither waits nor raises."""
        with contextlib.suppress(EndpointUnreachableError):
            _call("release", self.fleet, tuple(sessions))


def call_registry(method: str, *arguments: object) -> Any:
    """Call a method of the registry; return its answer.

    Raises:
        EndpointUnreachableError: The registry is gone, or does not answer.
    """
    try:
        try:
            return get_result(_call(method, *arguments), _TIMEOUT_S)
        except EndpointUnreachableError:
            _cached_registry.cache_clear()
            return get_result(_call(method, *arguments), _TIMEOUT_S)
    except EndpointTimeoutError as error:
        raise EndpointUnreachableError("the registry of endpoints does not answer") from error


def _call(method: str, *arguments: object) -> Any:
    """Call a method of the registry; return the reference of its answer.

    Raises:
        EndpointUnreachableError: The registry is gone.
    """
    try:
        # Where Ray has been shut down, a look-up of an actor would start another Ray.
        if not ray.is_initialized():
            raise ValueError("this process is not connected to Ray")
        context = ray.get_runtime_context()
        period = int(time.monotonic() / _CACHED_FOR_S)
        registry = _cached_registry(context.get_node_id(), context.get_job_id(), period)
        return getattr(registry, method).remote(*arguments)
    except (ValueError, ray.exceptions.RayError) as error:
        raise EndpointUnreachableError(
            "the registry of endpoints is gone, and the fleets with it; start a new fleet"
        ) from error


@functools.lru_cache(maxsize=1)
def _cached_registry(node_id: str, job_id: str, period: int) -> Any:
    """Return the registry's handle, cached per connection and period: the look-up is slow."""
    return find_registry()
