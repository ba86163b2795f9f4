"""FleetResolver: what of a fleet travels to wherever a runner is."""

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.fleet_manager import find_fleet_manager
from rlmesh_ray.actors.ray_calls import get_result
from rlmesh_ray.actors.registry.registry_actor import find_registry
from rlmesh_ray.actors.registry.session_assignment import Assignment
from rlmesh_ray.auth.tokens import derive_token
from rlmesh_ray.errors import EndpointError, EndpointTimeoutError, EndpointUnreachableError

_TIMEOUT_S = 30.0
_MOVE_TIMEOUT_S = 60.0
_CACHED_FOR_S = 30.0
"""So long the registry is not looked for again: it may have been lost for good, and come anew."""


@dataclass(frozen=True, slots=True)
class FleetResolver:
    """Looks a fleet's endpoints up in the registry, and gets sessions their seats there."""

    endpoint_ids: tuple[str, ...]
    """As the plan knows them; the fleet may have got others since."""
    fleet: str = ""
    secret: str | None = field(default=None, repr=False)
    """From which the token of each endpoint is derived; None: its users have been told."""
    reserved: tuple[str, ...] = ()
    """Endpoints for those sessions only whose index is one of theirs: those of evaluation."""
    is_near: bool = False
    """Whether endpoints are brought to the runners that claim them first."""

    def __len__(self) -> int:
        return len(self.endpoint_ids)

    def address(self, index: int) -> str:
        """Return where endpoint ``index`` is now.

        Raises:
            EndpointUnreachableError: It is not announced, or the registry is gone.
        """
        endpoint_id = self.endpoint_ids[index]
        record = call_registry("lookup", endpoint_id)
        if record is None:
            raise EndpointUnreachableError(
                f"endpoint {endpoint_id} is not announced: it restarts or is gone, or its fleet "
                "has been stopped; start a new one then"
            )
        return str(record.address)

    def assign(self, session: str, index: int, node_id: str) -> Assignment:
        """Return where a session is to be opened, now or again.

        Args:
            session: Its name, which no other session of the cluster has.
            index: The endpoint that was dealt to it; it gets another if that is gone or too full.
            node_id: Where its runner is.

        Raises:
            EndpointUnreachableError: No endpoint of the fleet is there just now.
        """
        wanted = self.endpoint_ids[index]
        if self.is_near and node_id:
            self._move_near(wanted, node_id)
        record = call_registry("assign", self.fleet, session, wanted, node_id, self.reserved)
        if record is None:
            raise EndpointUnreachableError(
                f"no endpoint of the fleet of {wanted} is announced: all of them restart or are "
                "gone, or the fleet has been stopped, or its driver has ended; start a new one then"
            )
        token = derive_token(self.secret, record.endpoint_id) if self.secret else None
        return Assignment(record.address, record.endpoint_id, record.incarnation, token)

    def _move_near(self, endpoint_id: str, node_id: str) -> None:
        """Have an endpoint come near, if it can."""
        # Wherever it is, it can be used; and if it is not there, the registry will know.
        with contextlib.suppress(ValueError, EndpointError, ray.exceptions.RayError):
            get_result(
                find_fleet_manager(self.fleet).move_near.remote(endpoint_id, node_id),
                _MOVE_TIMEOUT_S,
            )

    def rebalance(self, placed: Mapping[str, str]) -> Any:
        """Ask which sessions shall move to another seat; does not wait for the answer.

        Args:
            placed: Endpoint id of each session of a runner.

        Returns:
            The reference of a tuple of their names.

        Raises:
            EndpointUnreachableError: There is nobody to ask just now.
        """
        return _call("rebalance", self.fleet, dict(placed), self.reserved)

    def release(self, sessions: Iterable[str]) -> None:
        """Give the seats of sessions back that have ended. Neither waits nor raises."""
        with contextlib.suppress(EndpointUnreachableError):
            _call("release", self.fleet, tuple(sessions))


def call_registry(method: str, *arguments: object) -> Any:
    """Ask the registry, and wait for its answer.

    Raises:
        EndpointUnreachableError: It is gone, or does not answer.
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
    """Ask the registry; return the reference of its answer.

    Raises:
        EndpointUnreachableError: It is gone.
    """
    try:
        # Whatever looks for an actor would start a Ray of its own where there is none any more.
        if not ray.is_initialized():
            raise ValueError("this process is not connected to Ray")
        context = ray.get_runtime_context()
        period = int(time.monotonic() / _CACHED_FOR_S)
        registry = _cached_registry(context.get_node_id(), context.get_job_id(), period)
        return getattr(registry, method).remote(*arguments)
    except (ValueError, ray.exceptions.RayError) as error:
        raise EndpointUnreachableError(
            "the registry of endpoints is gone, and the fleets with it; start a new one"
        ) from error


@functools.lru_cache(maxsize=1)
def _cached_registry(node_id: str, job_id: str, period: int) -> Any:
    """Return the registry; once in a connection and period, since looking for it takes a while."""
    return find_registry()
