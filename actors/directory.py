"""FleetDirectory: what of a fleet travels to wherever a runner is."""

import contextlib
import functools
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from rlmesh_ray.actors.calls import answer
from rlmesh_ray.actors.keeper import find_keeper
from rlmesh_ray.actors.registry import find_registry
from rlmesh_ray.actors.seating import Seat
from rlmesh_ray.errors import EndpointError, EndpointTimeoutError, EndpointUnreachableError
from rlmesh_ray.protocol.token import derive_token

_TIMEOUT_S = 30.0
_SETTLE_TIMEOUT_S = 60.0
_KNOWN_FOR_S = 30.0
"""So long the registry is not looked for again: it may have been lost for good, and come anew."""


@dataclass(frozen=True, slots=True)
class FleetDirectory:
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
        record = ask_registry("lookup", endpoint_id)
        if record is None:
            raise EndpointUnreachableError(
                f"endpoint {endpoint_id} is not announced: it restarts or is gone, or its fleet "
                "has been stopped; start a new one then"
            )
        return str(record.address)

    def claim(self, session: str, index: int, node_id: str) -> Seat:
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
            self._settle(wanted, node_id)
        record = ask_registry("claim", self.fleet, session, wanted, node_id, self.reserved)
        if record is None:
            raise EndpointUnreachableError(
                f"no endpoint of the fleet of {wanted} is announced: all of them restart or are "
                "gone, or the fleet has been stopped, or its driver has ended; start a new one then"
            )
        token = derive_token(self.secret, record.endpoint_id) if self.secret else None
        return Seat(record.address, record.endpoint_id, record.incarnation, token)

    def _settle(self, endpoint_id: str, node_id: str) -> None:
        """Have an endpoint come near, if it can."""
        # Wherever it is, it can be used; and if it is not there, the registry will know.
        with contextlib.suppress(ValueError, EndpointError, ray.exceptions.RayError):
            answer(find_keeper(self.fleet).settle.remote(endpoint_id, node_id), _SETTLE_TIMEOUT_S)

    def survey(self, seated: Mapping[str, str]) -> Any:
        """Ask which sessions shall move to another seat; does not wait for the answer.

        Args:
            seated: Endpoint id of each session of a runner.

        Returns:
            The reference of a tuple of their names.

        Raises:
            EndpointUnreachableError: There is nobody to ask just now.
        """
        return _call("survey", self.fleet, dict(seated), self.reserved)

    def release(self, sessions: Iterable[str]) -> None:
        """Give the seats of sessions back that have ended. Neither waits nor raises."""
        with contextlib.suppress(EndpointUnreachableError):
            _call("release", self.fleet, tuple(sessions))


def ask_registry(method: str, *arguments: object) -> Any:
    """Ask the registry, and wait for its answer.

    Raises:
        EndpointUnreachableError: It is gone, or does not answer.
    """
    try:
        try:
            return answer(_call(method, *arguments), _TIMEOUT_S)
        except EndpointUnreachableError:
            _registry_known_to.cache_clear()
            return answer(_call(method, *arguments), _TIMEOUT_S)
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
        period = int(time.monotonic() / _KNOWN_FOR_S)
        registry = _registry_known_to(context.get_node_id(), context.get_job_id(), period)
        return getattr(registry, method).remote(*arguments)
    except (ValueError, ray.exceptions.RayError) as error:
        raise EndpointUnreachableError(
            "the registry of endpoints is gone, and the fleets with it; start a new one"
        ) from error


@functools.lru_cache(maxsize=1)
def _registry_known_to(node_id: str, job_id: str, period: int) -> Any:
    """Return the registry; once in a connection and period, since looking for it takes a while."""
    return find_registry()
