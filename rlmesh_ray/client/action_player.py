"""ActionPlayer: the actions of a served policy for a loop that its caller runs, in chunks."""

import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

import gymnasium
import numpy as np
from numpy.typing import NDArray

from rlmesh_ray.client.chunk_player import (
    AUTO,
    NEWEST,
    Blend,
    ChunkPlayer,
    ChunkRequest,
    PlayerStatistics,
    require_blendable,
)
from rlmesh_ray.client.model_dialect import Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    EndpointError,
    LocalProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.options import as_int
from rlmesh_ray.spaces.batch import Column, flatten, leaves, stack, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.spaces.validation import coerce_batch

if TYPE_CHECKING:  # RemoteModel makes players
    from rlmesh_ray.client.remote_model import RemoteModel

_Sent = Sequence[tuple[ChunkPlayer, ChunkRequest]]
"""The players whose rows a message has, in their order, and their requests."""
_Answer = tuple[Any, float]
"""Chunks of some lanes, and when they came."""


class ActionPlayer:
    """Actions for a loop that its caller runs, from chunks that are asked for ahead of time.

    ``RemoteModel.actions`` makes it. One lane, or all lanes of a vector, have a ``ChunkPlayer``
    each. The next chunks are asked for in a thread of the player's own, with one message for all
    lanes, while the present ones are played. ``act`` waits only for an action that is missing: that
    of an episode's first step, and of a step that has come before its chunk. To be used by one
    thread at a time.

    Args:
        model: The session with the policy, with a route for the environment.
        env: See ``RemoteModel.actions``, as all others.
    """

    def __init__(
        self,
        model: "RemoteModel",
        env: Any,
        *,
        route_id: str,
        execution_horizon: int | None = None,
        prefetch: int | str = AUTO,
        blend: Blend = NEWEST,
    ) -> None:
        contract = contract_of(env)
        self._players = [
            ChunkPlayer(execution_horizon=execution_horizon, prefetch=prefetch, blend=blend)
            for _ in range(contract.num_envs)
        ]
        for leaf in leaves(contract.action_space):
            if leaf.dtype is None:
                where = f" {leaf.name!r}" if leaf.name else ""
                raise UnsupportedSpaceError(
                    f"the action{where} is text, which no player can take: use predict_chunk"
                )
            require_blendable(blend, leaf.dtype, leaf.name)
        self._model = model
        self._route_id = route_id
        self._observation_space = contract.observation_space
        self._action_space = contract.action_space
        self._is_batched = isinstance(env, gymnasium.vector.VectorEnv) or contract.num_envs > 1
        self._resets_next_step = _autoreset_mode(env) == AutoresetMode.NEXT_STEP.value
        self._episode_ids = [""] * contract.num_envs
        self._num_episodes = 0
        self._actions: list[Any] = [None] * contract.num_envs
        """The latest action of each lane."""
        self._has_action = np.zeros(contract.num_envs, np.bool_)
        """Lanes whose action of this step is there, though an error has kept ``act`` from
        returning it."""
        self._is_ending = np.zeros(contract.num_envs, np.bool_)
        """Lanes that reset themselves on the step that follows."""
        self._executor: ThreadPoolExecutor | None = None
        self._pending: tuple[Future[_Answer], _Sent] | None = None
        self._is_closed = False
        for lane in range(contract.num_envs):
            self._begin(lane)

    @property
    def statistics(self) -> PlayerStatistics:
        """The counters of all lanes together, and the longest latency."""
        own = [player.statistics for player in self._players]
        added = PlayerStatistics(*map(sum, zip(*own, strict=True)))
        return added._replace(latency_s=max(each.latency_s for each in own))

    def act(self, observation: Any, *, done: Any = False, skipped: int = 0) -> Any:
        """Return the next action.

        Args:
            observation: Of an environment; of a vector: of all lanes. It is copied where it is
                sent, so the environment may overwrite it.
            done: Whether the latest step has ended an episode (``terminated or truncated``): this
                observation is the first of the next one. Of a vector one a lane. Where lanes reset
                themselves on the step after (``AutoresetMode.NEXT_STEP``), this observation is the
                last of its episode, and the next one begins with the following call.
            skipped: How many steps have passed since the latest one without an action, as those of
                a robot that moves on while this waits. Their actions are left out. 0 where this is
                called again after an error.

        Raises:
            ConfigurationError: The policy returns fewer actions than the execution horizon,
                ``blend`` no action, or ``skipped`` is no number of steps.
            ConformanceError: ``observation`` or ``done`` does not fit the environment.
            LocalProtocolError: The player is closed.
            RemoteModelError: The endpoint answered with an error.
            EndpointError: The session broke, or no answer came in time.
        """
        if self._is_closed:
            raise LocalProtocolError("the player is closed: RemoteModel.actions makes another one")
        if as_int("skipped", skipped) < 0:
            raise ConfigurationError(f"skipped={skipped} must be 0 or more")
        is_over = self._begin_episodes(done)
        settled = self._has_action | is_over
        lanes = np.flatnonzero(~settled).tolist()
        for lane in lanes:
            if self._players[lane].step:  # else its episode begins with this observation
                self._players[lane].skip(skipped)
        self._receive(wait=False)
        self._request_ahead(observation, lanes)
        missing = self._play(lanes)
        while missing:
            lacking = [lane for lane in missing if self._players[lane].wants_request()]
            if self._pending is not None and not lacking:
                self._receive(wait=True)
            else:
                rows, slots, sent = self._message(observation, lacking or missing)
                self._deliver(sent, lambda: self._ask(rows, slots))  # noqa: B023  # called at once
            missing = self._play(missing)
        self._has_action[:] = False
        self._is_ending = is_over
        if not self._is_batched:
            return unflatten(self._action_space, self._actions[0])
        return unflatten(
            self._action_space, [np.stack(parts) for parts in zip(*self._actions, strict=True)]
        )

    def begin_episode(self, lane: int, episode_id: str) -> None:
        """Begin an episode with the next observation; ``act`` does so where a lane is done.

        Args:
            lane: Index of the lane; 0 for a single environment.
            episode_id: Id of the episode in requests; another one for each episode.

        Raises:
            ConfigurationError: There is no such lane.
        """
        if not 0 <= as_int("lane", lane) < len(self._players):
            raise ConfigurationError(f"lane={lane} must be from 0 to {len(self._players) - 1}")
        self._players[lane].begin_episode()
        self._episode_ids[lane] = episode_id
        self._has_action[lane] = False

    def close(self) -> None:
        """Close the route and end the player's thread; the session stays open. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = self._pending = None
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(EndpointError):  # a session that broke has no routes
                self._model.close_route(self._route_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not issubclass(kind, Exception):  # such as Ctrl-C
            self._is_closed = True
            if self._executor is not None:  # the session's end ends its thread, and the route
                self._executor.shutdown(wait=False, cancel_futures=True)
                self._executor = self._pending = None
        self.close()

    def _begin(self, lane: int) -> None:
        self._num_episodes += 1
        self.begin_episode(lane, f"{self._route_id}-{self._num_episodes}")

    def _begin_episodes(self, done: Any) -> NDArray[np.bool_]:
        """Begin the episodes of this observation; return the lanes whose action is ignored."""
        try:
            values = np.asarray(done)
            is_done = np.broadcast_to(values.astype(np.bool_), self._is_ending.shape)
        except ValueError as error:
            problem = f"is not one a lane, of shape {self._is_ending.shape}: {error}"
            raise ConformanceError("structure", "done", problem) from error
        if values.dtype.kind not in "biuf" or not (values == is_done).all():  # "False" is no False
            problem = f"is {done!r:.40}, expected True or False, one a lane"
            raise ConformanceError("structure", "done", problem)
        begins, is_over = is_done, np.zeros_like(self._is_ending)
        if self._resets_next_step:
            # No step has been taken where an episode has just begun, so none can have ended it.
            has_acted = [player.step > 0 for player in self._players]
            is_over = is_done & ~self._is_ending & has_acted
            begins = self._is_ending
        for lane in np.flatnonzero(begins).tolist():
            self._begin(lane)
        return is_over

    def _play(self, lanes: Sequence[int]) -> list[int]:
        """Take the next action of each lane; return the lanes that have none."""
        now_s = time.monotonic()
        missing = []
        for lane in lanes:
            action = self._players[lane].next_action(now_s)
            if action is None:
                missing.append(lane)
            else:
                self._actions[lane], self._has_action[lane] = action, True
        return missing

    def _request_ahead(self, observation: Any, lanes: Sequence[int]) -> None:
        """Ask in the background for all lanes that have actions left, if one lane wants it."""
        if self._pending is not None:
            return
        players = self._players
        able = [lane for lane in lanes if players[lane].num_left and players[lane].can_request]
        if not any(players[lane].wants_request() for lane in able):
            return
        rows, slots, sent = self._message(observation, able)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="rlmesh-ray-actions")
        self._pending = (self._executor.submit(self._ask, rows, slots), sent)

    def _ask(self, rows: Any, slots: Slots) -> _Answer:
        chunk = self._model.predict_chunk(rows, route_id=self._route_id, slots=slots)
        return chunk, time.monotonic()

    def _message(self, observation: Any, lanes: list[int]) -> tuple[Any, Slots, _Sent]:
        """Return copies of the observations of some lanes, and record that they are sent."""
        if self._is_batched:
            columns = coerce_batch(self._observation_space, observation, len(self._players))
        else:
            columns = stack(self._observation_space, [observation])
        rows = unflatten(self._observation_space, [_rows_of(column, lanes) for column in columns])
        players = [self._players[lane] for lane in lanes]
        slots = Slots(
            env_indices=lanes,
            episode_ids=[self._episode_ids[lane] for lane in lanes],
            steps=[player.step for player in players],
            resets=[player.step == 0 for player in players],
        )
        now_s = time.monotonic()
        return rows, slots, [(player, player.request_sent(now_s)) for player in players]

    def _receive(self, *, wait: bool) -> None:
        """Take the answer of the background, if it is there or has to be waited for."""
        if self._pending is not None:
            future, sent = self._pending
            if wait or future.done():
                self._pending = None
                self._deliver(sent, future.result)

    def _deliver(self, sent: _Sent, answer: Callable[[], _Answer]) -> None:
        """Give each player its row of an answer."""
        try:
            chunk, arrived_s = answer()
            columns = flatten(self._action_space, chunk)
            for row, (player, request) in enumerate(sent):
                player.chunk_arrived(request, tuple(column[row] for column in columns), arrived_s)
        except BaseException:
            for player, request in sent:
                player.request_failed(request)
            raise


def _rows_of(column: Column, lanes: list[int]) -> Column:
    if isinstance(column, np.ndarray):
        return column[lanes]
    return tuple(column[lane] for lane in lanes)


def _autoreset_mode(env: Any) -> str:
    mode = getattr(env, "autoreset_mode", None)  # of a contract, or a RemoteVectorEnv
    if mode is None and isinstance(env, gymnasium.vector.VectorEnv):
        mode = env.metadata.get("autoreset_mode")
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return AutoresetMode.NEXT_STEP.value
        env = env.env
    return str(getattr(mode, "value", ""))
