"""The routes of one model session, and how many of them and their lanes there may be."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rlmesh_ray.errors import CapacityError, CodecError, ContractMismatchError
from rlmesh_ray.protocol.episodes import MAX_ID_CHARACTERS
from rlmesh_ray.protocol.route_lanes import RouteLanes
from rlmesh_ray.server.batch_form import BatchForm
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
    form: BatchForm
    """With its contract."""
    lanes: RouteLanes


class ModelRoutes:
    """The routes of one session. To be used in the serving loop only.

    Args:
        host: Runs the policy.
        make_lanes: Returns the lanes of a route, by its contract.
        keeps_same: Whether a route goes on as it is when it is configured once more for the
            environment that it is for.
    """

    def __init__(
        self,
        host: ModelHost,
        make_lanes: Callable[[EnvContract], RouteLanes],
        *,
        keeps_same: bool,
    ) -> None:
        self.by_id: dict[str, Route] = {}
        """Those that are there."""
        self._host = host
        self._make_lanes = make_lanes
        self._keeps_same = keeps_same
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
            CodecError: The route's name is too long.
            CapacityError: The session would have too many routes, or too many lanes.
            PolicyError: The policy could not forget what the route was before.
        """
        if not isinstance(contract, EnvContract):
            raise ContractMismatchError("ConfigureRoute came without an environment contract")
        if len(route_id) > MAX_ID_CHARACTERS:
            raise CodecError(
                f"the route's name has {len(route_id)} characters, and {MAX_ID_CHARACTERS} are the "
                "limit: choose a shorter one"
            )
        if num_routes > MAX_ROUTES:
            raise CapacityError(
                f"the session has {MAX_ROUTES} routes, which is the limit: close one first, or "
                "open another session"
            )
        key, before = f"{self._key}/{route_id}", self.by_id.get(route_id)
        if before is not None and self._keeps_same and _acts_alike(contract, before.form.contract):
            return
        lanes = self._make_lanes(contract)
        with self._room_for(route_id, lanes.num_claimed):
            if before is None:
                await self._host.configure(contract)
            else:
                await self._host.reconfigure(key, contract)
                before.lanes.clear()
        self.by_id[route_id] = Route(key, BatchForm(contract), lanes)

    async def forget(self, route_id: str, episode_ids: Sequence[str]) -> None:
        """Forget episodes of a route, if it is there.

        Raises:
            RlmeshError: The policy could not; their lanes are still theirs.
        """
        route = self.by_id.get(route_id)
        if route is None:
            return
        lanes = route.lanes.lanes_of(episode_ids)
        if lanes:
            await self._host.forget_lanes(route.key, lanes)
            route.lanes.free(episode_ids)

    async def close(self, route_id: str) -> None:
        """End a route, if it is there.

        Raises:
            RlmeshError: The policy could not forget it; it is still there.
        """
        route = self.by_id.get(route_id)
        if route is None:
            return
        await self._host.forget(route.key)
        route.lanes.clear()
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
        before = self._num_lanes.get(route_id)
        total = sum(self._num_lanes.values()) - (before or 0) + num_lanes
        if total > MAX_LANES:
            raise CapacityError(
                f"the session's routes would have {total} lanes, and {MAX_LANES} are the limit: "
                "close a route first, or open another session"
            )
        self._num_lanes[route_id] = num_lanes
        try:
            yield
        except BaseException:
            if before is None:
                del self._num_lanes[route_id]
            else:
                self._num_lanes[route_id] = before
            raise


def _acts_alike(one: EnvContract, other: EnvContract) -> bool:
    # Their metadata may hold arrays, which do not say whether they are equal.
    return (one.id, one.observation_space, one.action_space) == (
        other.id,
        other.observation_space,
        other.action_space,
    )
