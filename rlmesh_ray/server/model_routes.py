"""The routes of one model session, and how many of them and their lanes there may be."""

import asyncio
import contextlib
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlmesh_ray.errors import CapacityError, CodecError, ContractMismatchError
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.server.model_host import ModelHost
from rlmesh_ray.spaces.contract import EnvContract

MAX_ROUTES = 1024
"""Routes of one session; each keeps its contract in memory."""
MAX_LANES = 2**16
"""Lanes of all routes of one session together. A policy may remember something about each of them,
and a client can claim any number of lanes in one request."""


class Route(NamedTuple):
    """A route that is configured."""

    key: str
    """Its name over all sessions of the server."""
    contract: EnvContract


class ModelRoutes:
    """The routes of one session. To be used in the serving loop only.

    Args:
        host: Runs the policy.
    """

    def __init__(self, host: ModelHost) -> None:
        self.by_id: dict[str, Route] = {}
        """Those that are there."""
        self._host = host
        self._key = uuid.uuid4().hex
        self._num_lanes: dict[str, int] = {}
        """Of the routes that are there, and of those about to be."""

    async def configure(self, route_id: str, contract: object, num_routes: int) -> None:
        """Open a route, or begin anew with one that is there.

        Args:
            route_id: The client's name for it.
            contract: What the request came with.
            num_routes: Of the session, with those about to be and this one.

        Raises:
            ContractMismatchError: The policy cannot act there, or there is no contract.
            CapacityError: The session would have too many routes, or too many lanes.
            PolicyError: The policy could not forget what the route was before.
        """
        if not isinstance(contract, EnvContract):
            raise ContractMismatchError("ConfigureRoute came without an environment contract")
        if num_routes > MAX_ROUTES:
            raise CapacityError(
                f"the session has {MAX_ROUTES} routes, which is the limit: close one first, or "
                "open another session"
            )
        key = f"{self._key}/{route_id}"
        with self._room_for(route_id, contract.num_envs):
            if route_id in self.by_id:
                await self._host.reconfigure(key, contract)
            else:
                await self._host.configure(contract)
        self.by_id[route_id] = Route(key, contract)

    async def close(self, route_id: str) -> None:
        """End a route that is there.

        Raises:
            RlmeshError: The policy could not forget it; it is still there.
        """
        await self._host.forget(self.by_id[route_id].key)
        # Not before: whoever releases the session meanwhile has to forget the route.
        del self.by_id[route_id], self._num_lanes[route_id]

    async def abandon(self) -> None:
        """End all routes with the session, whatever the policy says; to be run to its end."""
        for route in tuple(self.by_id.values()):
            try:
                # After the batch that may be running with rows of the route.
                await self._host.abandon(route.key)
            except asyncio.CancelledError:  # the endpoint has stopped, and the policy with it
                return

    @contextlib.contextmanager
    def _room_for(self, route_id: str, num_lanes: int) -> Iterator[None]:
        """Count a route's lanes, unless the context raises."""
        before = self._num_lanes.get(route_id, 0)
        total = sum(self._num_lanes.values()) - before + num_lanes
        if total > MAX_LANES:
            raise CapacityError(
                f"the session's routes would have {total} lanes, and {MAX_LANES} are the limit: "
                "close a route first, or open another session"
            )
        self._num_lanes[route_id] = num_lanes
        try:
            yield
        except BaseException:
            self._num_lanes[route_id] = before
            if not before:
                del self._num_lanes[route_id]
            raise


def check_slots(slots: Sequence[PredictSlot], contract: EnvContract) -> None:
    """Refuse slots that would make the policy's state ambiguous, or grow without bound.

    Raises:
        CodecError: There are none, or they are not different lanes of the route.
    """
    if len(slots) == 1 and 0 <= slots[0].env_index < contract.num_envs:
        return
    if not slots:
        raise CodecError("Predict names no slots; give one a row of the observation")
    lanes = {slot.env_index for slot in slots}
    if len(lanes) < len(slots):
        raise CodecError("Predict names an env_index twice; each slot needs one of its own")
    if min(lanes) < 0 or max(lanes) >= contract.num_envs:
        raise CodecError(
            f"Predict names env_index {min(lanes)} to {max(lanes)}; the route's contract has "
            f"num_envs = {contract.num_envs}"
        )
