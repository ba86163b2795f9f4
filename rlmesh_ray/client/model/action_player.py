"""ActionPlayer: the actions of a served policy for a loop that its caller runs, in chunks."""

import bisect
import contextlib
import math
import operator
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import gymnasium
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh_ray.client.model.model_dialect import Slots
from rlmesh_ray.errors import (
    ConfigurationError,
    ConformanceError,
    EndpointError,
    LocalProtocolError,
    UnsupportedSpaceError,
)
from rlmesh_ray.options import as_int, require_count
from rlmesh_ray.spaces.batch import Column, flatten, leaves, stack, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.gym_conversion import contract_of
from rlmesh_ray.spaces.validation import coerce_batch

if TYPE_CHECKING:  # RemoteModel makes players
    from rlmesh_ray.client.model.remote_model import RemoteModel


Blend = str | Callable[[NDArray[Any]], ArrayLike]
"""``"newest"``, ``"mean"``, or a function; see ``ChunkPlayer``."""

AUTO, NEWEST, MEAN = "auto", "newest", "mean"
_NUM_MEASURED = 8
"""How many of the latest latencies and periods ``prefetch="auto"`` looks at."""


class ChunkRequest(NamedTuple):
    """What a chunk was asked for: its first action is that of this step of this episode."""

    episode: int
    step: int
    sent_s: float


class PlayerStatistics(NamedTuple):
    """Counters of a player, over all episodes."""

    num_actions: int
    """Actions that were played."""
    num_starved: int
    """Steps whose action had not come when it was asked for. The first step of an episode is not
    counted: its observation is new, so its action can never be there."""
    num_late: int
    """Actions that were dropped, since their step was over when they came: of each chunk that was
    asked for ahead of time, those of the steps that its latency took."""
    num_stale: int
    """Actions that were dropped, since their episode was over when they came."""
    latency_s: float
    """The longest of the latest 8 latencies; 0.0 before the first answer."""


class _Chunk(NamedTuple):
    step: int  # of its first action
    actions: Any


def require_blendable(blend: object, dtype: np.dtype[Any] | None, name: str) -> None:
    """Require that actions of this dtype can be blended so.

    Raises:
        ConfigurationError: ``"mean"`` with actions that are not floats.
    """
    if blend == MEAN and (dtype is None or dtype.kind != "f"):
        where = f"the action {name!r}" if name else "the action"
        raise ConfigurationError(
            f"blend={MEAN!r} is for floats, and {where} is {dtype or 'text'}: take {NEWEST!r}, or "
            "a function"
        )


class ChunkPlayer:
    """Plays the actions of one lane (one environment, or one of a vector), chunk by chunk.

    Before each step, the caller asks ``wants_request`` and, if so, sends the observation of this
    step to the policy and calls ``request_sent``. It calls ``chunk_arrived`` with each answer, and
    ``next_action`` once a step. While a request takes L steps, no step waits for its action if
    ``2 * L`` is at most the execution horizon, the first of each episode excepted: only one request
    is on its way, so each chunk has to last for its own latency and for that of the next one.

    Args:
        horizon: Number of actions in a chunk; None: that of the first chunk.
        execution_horizon: How many actions of a chunk are played, from its first; default: all.
        prefetch: With how many actions left the next chunk is asked for. ``"auto"``: as many as are
            played during the longest of the latest 8 latencies, and one more, but at most half of
            the execution horizon; 0 where not even the shortest is shorter than a chunk lasts. 0:
            none are left, so that each chunk is waited for. The horizon or more: once the one
            before it has come.
        blend: What is played where chunks overlap. ``"newest"``: the action of the chunk that was
            asked for last. ``"mean"``: the mean of all, for floats. A function: called for each
            leaf of the action where at least two chunks have one, with an array
            ``(candidates, *action)``, whose last row is that of the newest chunk; returns
            ``(*action,)``.

    Raises:
        ConfigurationError: An option is none, or the execution horizon is more than the horizon.
    """

    def __init__(
        self,
        horizon: int | None = None,
        *,
        execution_horizon: int | None = None,
        prefetch: int | str = AUTO,
        blend: Blend = NEWEST,
    ) -> None:
        if execution_horizon is not None:
            require_count("execution_horizon", execution_horizon)
        is_text = isinstance(prefetch, str)
        if prefetch != AUTO if is_text else as_int("prefetch", prefetch) < 0:
            raise ConfigurationError(f"prefetch={prefetch!r:.40} must be 0 or more, or {AUTO!r}")
        if not callable(blend) and not (isinstance(blend, str) and blend in (NEWEST, MEAN)):
            raise ConfigurationError(
                f"blend={blend!r:.40} is not {NEWEST!r}, {MEAN!r} or a function of an array "
                "(candidates, *action)"
            )
        self._wanted_horizon = execution_horizon
        self._prefetch = None if isinstance(prefetch, str) else int(prefetch)
        self._blend = blend
        self._horizon = 0
        self._execution_horizon = 0
        if horizon is not None:
            require_count("horizon", horizon)
            self._set_horizon(int(horizon))
        self._episode = 0
        self._step = 0
        self._chunks: list[_Chunk] = []
        """Those that have actions for this step or later ones, by their first step."""
        self._waiting: set[ChunkRequest] = set()
        """Requests of this episode that are not answered yet."""
        self._latencies: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._periods: deque[float] = deque(maxlen=_NUM_MEASURED)
        """From an action to the next call of ``next_action``: what a step takes the caller."""
        self._played_s: float | None = None
        self._starved_step = 0
        self._num_actions = self._num_starved = self._num_late = self._num_stale = 0

    @property
    def step(self) -> int:
        """Step of the episode whose action comes next."""
        return self._step

    @property
    def num_left(self) -> int:
        """For how many steps there are actions, this one included."""
        if not self._chunks:
            return 0
        return max(0, self._chunks[-1].step + self._execution_horizon - self._step)

    @property
    def prefetch(self) -> int:
        """With how many actions left the next chunk is asked for."""
        if self._prefetch is not None:
            return self._prefetch
        most = self._execution_horizon // 2
        if len(self._latencies) < 2 or not self._periods:
            return most  # the first latency may be that of a policy that warms up
        period_s = sum(self._periods) / len(self._periods)
        if min(self._latencies) >= period_s * self._execution_horizon:
            return 0  # what is asked for ahead of time would come too late, and delay the rest
        return min(most, math.ceil(max(self._latencies) / period_s) + 1)

    @property
    def can_request(self) -> bool:
        """Whether no request is on its way, and no chunk has come that begins at this step."""
        is_fresh = bool(self._chunks) and self._chunks[-1].step == self._step
        return not self._waiting and not is_fresh

    @property
    def statistics(self) -> PlayerStatistics:
        """What was played and dropped since the player was made."""
        latency_s = max(self._latencies, default=0.0)
        counters = self._num_actions, self._num_starved, self._num_late, self._num_stale
        return PlayerStatistics(*counters, latency_s)

    def begin_episode(self) -> None:
        """Begin anew at step 0: all actions are dropped, also those that are on their way."""
        self._episode += 1
        self._step = self._starved_step = 0
        self._chunks.clear()
        self._waiting.clear()
        self._played_s = None  # a reset takes longer than a step

    def skip(self, num_steps: int) -> None:
        """Leave out the actions of steps that the environment has taken without one.

        Raises:
            ConfigurationError: ``num_steps`` is not a number of steps.
        """
        if as_int("num_steps", num_steps) < 0:
            raise ConfigurationError(f"num_steps={num_steps} must be 0 or more")
        self._step += num_steps
        if num_steps:
            self._played_s = None  # it took more than a step

    def wants_request(self) -> bool:
        """Return whether to send the observation of this step to the policy."""
        return self.can_request and self.num_left <= self.prefetch

    def request_sent(self, now_s: float) -> ChunkRequest:
        """Record that the observation of this step was sent; return what the answer belongs to."""
        request = ChunkRequest(self._episode, self._step, now_s)
        self._waiting.add(request)
        return request

    def request_failed(self, request: ChunkRequest) -> None:
        """Record that no answer will come."""
        self._waiting.discard(request)

    def chunk_arrived(self, request: ChunkRequest, actions: Any, now_s: float) -> None:
        """Record an answer; what is too late by its step or its episode is dropped.

        Args:
            request: What it was asked for.
            actions: Arrays ``(horizon, *action)``; dicts and tuples of them, as the action space
                nests them.
            now_s: When it came.

        Raises:
            ConfigurationError: The first chunk has fewer actions than the execution horizon, or
                an action has no mean.
            ConformanceError: It has not ``horizon`` actions.
        """
        self._waiting.discard(request)
        chunk = _Chunk(request.step, _map_leaves(self._checked, actions))
        self._latencies.append(now_s - request.sent_s)
        most = self._execution_horizon
        if request.episode != self._episode:
            self._num_stale += most
            return
        num_late = min(self._step - request.step, most)
        if self._blend == NEWEST and self._chunks and self._chunks[-1].step > request.step:
            num_late = most
        self._num_late += num_late
        if num_late < most:
            if self._blend == NEWEST:
                self._chunks.clear()
            bisect.insort(self._chunks, chunk, key=operator.attrgetter("step"))

    def next_action(self, now_s: float) -> Any | None:
        """Return the action of this step, and go on to the next one.

        Args:
            now_s: The time, which measures the caller's steps.

        Returns:
            The action, nested as those of a chunk. None: it has not come; ask again once it has.
        """
        if self._played_s is not None:
            self._periods.append(now_s - self._played_s)
            self._played_s = None
        ends_after = self._step - self._execution_horizon
        self._chunks = [chunk for chunk in self._chunks if chunk.step > ends_after]
        if not self._chunks:
            if self._starved_step != self._step:
                self._starved_step = self._step
                self._num_starved += 1
            return None
        candidates = [self._action_of(chunk) for chunk in self._chunks]
        action = candidates[0]
        if len(candidates) > 1:
            action = _map_leaves(self._blended, *candidates)
        self._step += 1
        self._num_actions += 1
        self._played_s = now_s
        return action

    def _set_horizon(self, horizon: int) -> None:
        most = horizon if self._wanted_horizon is None else int(self._wanted_horizon)
        if most > horizon:
            raise ConfigurationError(
                f"execution_horizon={most} is more than the {horizon} that the policy returns at "
                f"once; give {horizon} or less"
            )
        self._horizon, self._execution_horizon = horizon, most

    def _checked(self, leaf: Any) -> NDArray[Any]:
        try:
            array = np.asarray(leaf)
        except ValueError as error:  # nested lists of unequal lengths
            raise ConformanceError(
                "structure", "", f"is not an array: {error}", root="chunk"
            ) from error
        length = len(array) if array.ndim else 0
        if not self._horizon and length:
            self._set_horizon(length)
        if length != self._horizon or not length:
            problem = f"has {length} actions, expected {self._horizon or '1 or more'}"
            raise ConformanceError("structure", "", problem, root="chunk")
        require_blendable(self._blend, array.dtype, "")
        return array

    def _action_of(self, chunk: _Chunk) -> Any:
        index = self._step - chunk.step
        return _map_leaves(lambda leaf: leaf[index], chunk.actions)

    def _blended(self, *values: Any) -> Any:
        candidates = np.stack(values)
        blend = self._blend if callable(self._blend) else _mean
        blended = np.asarray(blend(candidates))
        is_castable = np.can_cast(blended.dtype, candidates.dtype, "same_kind")
        if blended.shape != candidates.shape[1:] or not is_castable:
            raise ConfigurationError(
                f"blend made {blended.dtype} {blended.shape} of {candidates.dtype} "
                f"{candidates.shape}; it must return one action, of shape {candidates.shape[1:]}"
            )
        return blended.astype(candidates.dtype)[()]


def _mean(candidates: NDArray[Any]) -> Any:
    return candidates.mean(axis=0, dtype=np.float64)


def _map_leaves(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Apply a function to the leaves at the same place of several dicts, tuples or arrays."""
    if isinstance(first, Mapping):
        return {
            key: _map_leaves(function, part, *(each[key] for each in others))
            for key, part in first.items()
        }
    if isinstance(first, tuple):
        return tuple(_map_leaves(function, *parts) for parts in zip(first, *others, strict=True))
    return function(first, *others)


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
                ``blend`` no action, or ``skipped`` is not a number of steps.
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
