"""ChunkPlayer: which action of which chunk is played in a step. Without I/O."""

import bisect
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.options import as_int, require_count

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
        prefetch: At how many actions left the next chunk is asked for. ``"auto"``: as many as are
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
        ConfigurationError: An option is invalid, or the execution horizon exceeds the horizon.
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
            ConformanceError: It does not have ``horizon`` actions.
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
        """Return the action of this step, and advance to the next one.

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
