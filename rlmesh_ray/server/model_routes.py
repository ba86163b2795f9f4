"""The routes of one model session, and the limits of their number and lanes."""

import asyncio
import contextlib
import itertools
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rlmesh_ray.errors import CapacityError, CodecError, ContractMismatchError
from rlmesh_ray.protocol.episodes import MAX_ID_CHARACTERS
from rlmesh_ray.protocol.model_session import RouteLanes
from rlmesh_ray.server.batch_schema import BatchSchema
from rlmesh_ray.server.batcher import Batcher
from rlmesh_ray.server.error_text import text_of
from rlmesh_ray.server.log_context import current, logged_as
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.wire.batch_codec import BatchCodecs
from rlmesh_ray.wire.validation import MAX_LANES

_LOG = logging.getLogger(__name__)

MAX_ROUTES = 1024
"""Routes of one session; each keeps its contract in memory."""


class Route(NamedTuple):
    """A route that is configured."""

    key: str
    """Its unique name over all sessions of the server, also those that have ended."""
    schema: BatchSchema
    """Has the contract, too."""
    lanes: RouteLanes
    values: BatchCodecs
    """The codecs of its observations and actions."""


class ModelRoutes:
    """The routes of one session. To be used in the serving loop only.

    Args:
        batcher: Runs the policy.
        make_lanes: Returns the lanes of a route, by its contract.
        choose_values: Returns the codecs of its observations and actions, likewise.
        keeps_same: Whether a route that is configured again for the same environment goes on as it
            is.
    """

    def __init__(
        self,
        batcher: Batcher,
        make_lanes: Callable[[EnvContract], RouteLanes],
        choose_values: Callable[[EnvContract], BatchCodecs],
        *,
        keeps_same: bool,
    ) -> None:
        self.by_id: dict[str, Route] = {}
        """The open routes."""
        self._batcher = batcher
        self._make_lanes = make_lanes
        self._choose_values = choose_values
        self._keeps_same = keeps_same
        self._key = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._names = current()
        self._ending: set[asyncio.Future[None]] = set()
        """Done when the policy has forgotten a route that has ended."""
        self._num_lanes: dict[str, int] = {}
        """Lanes of the routes that are open or being opened."""

    async def configure(
        self, route_id: str, contract: object, horizon: int, num_routes: int
    ) -> None:
        """Open a route, or restart an open one.

        Args:
            route_id: The client's name for it.
            contract: Contract in the request, if it is valid.
            horizon: How many actions of each chunk the client wants; ignored where the policy
                chooses one at a time.
            num_routes: Routes of the session, with this one and others that are being opened.

        Raises:
            ContractMismatchError: The policy cannot act there, or its chunks are shorter than
                ``horizon``, or there is no contract, or it names an encoding that does not fit its
                spaces.
            CodecError: The route's name is too long.
            CapacityError: The session would have too many routes, or too many lanes.
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
        policy_horizon = self._batcher.horizon
        if 1 < policy_horizon < horizon:
            raise ContractMismatchError(
                f"the route wants {horizon} actions at once, and the policy chooses "
                f"{policy_horizon}: lower the horizon to {policy_horizon} or less"
            )
        schema = BatchSchema(contract, policy_horizon, min(horizon, policy_horizon))
        before = self.by_id.get(route_id)
        if (
            before is not None
            and self._keeps_same
            and before.schema.horizon == schema.horizon
            and _are_same_environment(contract, before.schema.contract)
        ):
            return
        lanes, values = self._make_lanes(contract), self._choose_values(contract)
        with self._room_for(route_id, lanes.num_reserved):
            while num_routes + len(self._ending) > MAX_ROUTES:
                # A client that opens and closes without end must wait, or it would fill the memory.
                await asyncio.wait(self._ending, return_when=asyncio.FIRST_COMPLETED)
            await self._batcher.configure(contract)
        # A new key each time: the policy may still have to forget the route that has ended.
        key = f"{self._key}/{next(self._numbers)}/{route_id}"
        self.by_id[route_id] = Route(key, schema, lanes, values)
        if before is not None:
            self._end(before)

    async def forget(self, route_id: str, episode_ids: Sequence[str]) -> None:
        """Forget episodes of a route, if it is open.

        Raises:
            RlmeshError: The policy could not; the episodes keep their lanes.
        """
        route = self.by_id.get(route_id)
        if route is None:
            return
        lanes = route.lanes.lanes_of(episode_ids)
        if lanes:
            await self._batcher.forget_lanes(route.key, lanes)
            route.lanes.free(episode_ids)

    def close(self, route_id: str) -> None:
        """End a route, if it is open; the policy forgets it later, by a call in its thread."""
        route = self.by_id.pop(route_id, None)
        if route is not None:
            del self._num_lanes[route_id]
            self._end(route)

    async def abandon(self) -> None:
        """End all routes with the session, and wait until the policy has forgotten them."""
        for route_id in tuple(self.by_id):
            self.close(route_id)
        if self._ending:
            # The policy does so after a running batch with their rows; or the endpoint has stopped.
            await asyncio.wait(self._ending)

    def _end(self, route: Route) -> None:
        route.lanes.clear()
        forgetting = self._batcher.forget(route.key)
        self._ending.add(forgetting)
        forgetting.add_done_callback(self._note_forgotten)

    def _note_forgotten(self, forgetting: "asyncio.Future[None]") -> None:
        self._ending.discard(forgetting)
        error = None if forgetting.cancelled() else forgetting.exception()
        if error is not None:
            with logged_as(*self._names):
                _LOG.warning("the policy failed to forget a route: %s", text_of(error))

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


def _are_same_environment(one: EnvContract, other: EnvContract) -> bool:
    # Their metadata may hold arrays, whose comparison is not a bool.
    return (one.id, one.observation_space, one.action_space) == (
        other.id,
        other.observation_space,
        other.action_space,
    )
