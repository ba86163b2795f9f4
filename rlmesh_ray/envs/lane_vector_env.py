"""LaneVectorEnv: a vector of single environments, for ids, factories and Env instances.

Its results equal those of gymnasium's SyncVectorEnv, bit for bit, with three differences: a single
lane has no autoreset (as gymnasium's Env), observations are written into columns that may be in
shared memory, and the last info of every ended episode is kept. ``TruncateOnBadValue`` wraps the
environments where ``on_bad_value="truncate"``.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from rlmesh_ray.envs.multi_agent import MultiAgentLane
from rlmesh_ray.errors import ConfigurationError, ConformanceError
from rlmesh_ray.spaces.batch import (
    Column,
    by_lane,
    by_leaf,
    coerce,
    empty_columns,
    flatten,
    leaves,
    stack,
    unflatten,
    write_lane_values,
)
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.multi_agent import REWARDS
from rlmesh_ray.spaces.validation import Checker, ConformanceWarning, ValidationMode, coerce_batch
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.transport.step_buffers import StepArrays

NoteResets = Callable[[int, int], None]
"""Gets how many lanes a request has reset by now, of how many."""
AddInfo = Callable[[dict[str, Any], dict[str, Any], int], dict[str, Any]]
"""``VectorEnv._add_info``: adds the info of one lane to the vector's infos."""


def merge_info(
    add: AddInfo, infos: dict[str, Any], info: dict[str, Any], lane: int, num_lanes: int
) -> None:
    """Add ``info`` to ``infos`` as gymnasium does; values that it cannot join become objects.

    Gymnasium fails for integers beyond int64, for containers that contain themselves, and where
    lanes have values of different types under one key.
    """
    try:
        add(infos, info, lane)
    except Exception:  # noqa: BLE001  # infos may contain any object
        # One by one, which takes several times as long and overwrites what has been added.
        for key, value in info.items():
            try:
                add(infos, {key: value}, lane)
            except Exception:  # noqa: BLE001
                array = np.full(num_lanes, None, object)
                own = {name: infos[name] for name in (key, f"_{key}") if name in infos}
                for other in np.flatnonzero(infos.get(f"_{key}", ())):
                    array[other] = lane_info(own, int(other))[key]
                array[lane] = value
                mask = infos.setdefault(f"_{key}", np.zeros(num_lanes, np.bool_))
                mask[lane] = True
                infos[key] = array


class MissingAttributeError(AttributeError):
    """An environment has no attribute of the name that a client calls."""


class LaneVectorEnv(VectorEnv[Any, Any, NDArray[Any]]):
    """A vector that steps its environments, which it owns, one after the other.

    The autoreset mode is ``DISABLED`` for one lane, whose environment then gets steps after the
    end, and ``NEXT_STEP`` for more, unless ``autoresets`` is False. ``reset_threads`` lanes are
    reset at the same time.

    Raises:
        ConfigurationError: The environments cannot be lanes of one vector.
        UnsupportedSpaceError: A contract cannot express their spaces.
    """

    def __init__(
        self,
        envs: Sequence[gymnasium.Env[Any, Any]],
        *,
        autoresets: bool = True,
        reset_threads: int = 1,
    ) -> None:
        self.envs = tuple(envs)
        num_threads = min(reset_threads, len(envs))
        self._threads = ThreadPoolExecutor(num_threads, "reset") if num_threads > 1 else None
        _check_lanes(envs)
        first = envs[0]
        self.num_envs = len(envs)
        self._autoresets = autoresets and self.num_envs > 1
        mode = AutoresetMode.NEXT_STEP if self._autoresets else AutoresetMode.DISABLED
        self.metadata = {**first.metadata, "autoreset_mode": mode}
        self.spec = first.spec
        self.render_mode = first.render_mode
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        self._spec = from_gymnasium(first.observation_space)
        self._action_spec = from_gymnasium(first.action_space)
        self._leaves = leaves(self._spec)
        self._has_ended = [False] * self.num_envs
        # The observations of these lanes that ``flush`` has still to write.
        self._fresh_lanes: Sequence[int] = ()
        self._fresh: list[object] = []
        self._rewards: list[Any] = []
        self.note_resets: NoteResets = lambda num_reset, num_lanes: None
        """Called before the first reset of a request, and after each."""
        self.final_infos: dict[int, dict[str, Any]] = {}
        """Last info of each episode that ended on the last step, by lane."""
        self.observations: list[Column] = empty_columns(self._spec, self.num_envs)
        """Columns that ``flush`` writes."""
        self.results = StepArrays(
            np.zeros(self.num_envs), np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        )
        """What ``step_columns`` writes."""

    @property
    def steps_subsets(self) -> bool:
        """Whether any of the lanes can be stepped alone: they have no autoreset."""
        return not self._autoresets

    @property
    def lane_in_progress(self) -> int | None:
        """The lane whose environment is being stepped or reset, or has raised; None without one."""
        done, lanes = len(self._fresh), self._fresh_lanes
        return lanes[done] if done < len(lanes) else None

    @property
    def lane_without_reward(self) -> int | None:
        """The first lane whose environment gave None as its reward, which NumPy makes NaN."""
        if None not in self._rewards:
            return None
        return self._fresh_lanes[self._rewards.index(None)]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Any = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start new episodes, as ``gymnasium.vector.SyncVectorEnv.reset`` does."""
        options = dict(options) if options is not None else None
        mask = options.pop("reset_mask", None) if options else None
        lanes = range(self.num_envs) if mask is None else np.flatnonzero(mask).tolist()
        seeds = [seed + lane for lane in range(self.num_envs)] if isinstance(seed, int) else seed
        chosen = [seeds[lane] for lane in lanes] if seeds else ()
        infos = self.reset_lanes(lanes, chosen, options)
        return self._copied_observation(), infos

    def step(
        self, actions: Any
    ) -> tuple[Any, NDArray[Any], NDArray[Any], NDArray[Any], dict[str, Any]]:
        """Step every lane, as ``gymnasium.vector.SyncVectorEnv.step`` does."""
        infos = self.step_columns(coerce_batch(self._action_spec, actions, self.num_envs))
        return (
            self._copied_observation(),
            self.results.rewards.copy(),
            self.results.terminated.copy(),
            self.results.truncated.copy(),
            infos,
        )

    def reset_lanes(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int | None],
        options: Mapping[str, object] | None,
    ) -> dict[str, Any]:
        """Start new episodes in ``lanes``; ``flush`` then writes the observations.

        ``seeds`` is empty, or has one for each of ``lanes``. Returns the lanes' infos, in the form
        of gymnasium's vectors.
        """
        infos: dict[str, Any] = {}
        fresh: list[object] = []
        self._fresh_lanes, self._fresh = lanes, fresh
        self.final_infos = {}
        arguments = {
            lane: {"seed": seed, "options": None if options is None else dict(options)}
            for lane, seed in zip(lanes, seeds or [None] * len(lanes), strict=True)
        }
        for lane, reset in self._resets(arguments).items():
            observation, info = reset()
            fresh.append(observation)
            self._has_ended[lane] = False
            merge_info(self._add_info, infos, info, lane, self.num_envs)
        return infos

    def _resets(
        self, arguments: Mapping[int, dict[str, Any]]
    ) -> dict[int, Callable[[], tuple[Any, dict[str, Any]]]]:
        """Return for each lane, in order, a function that returns its first observation and info.

        With threads the lanes have been reset by then; without, each is reset by that call.
        ``arguments`` are the keyword arguments of each lane's ``reset``.
        """
        num_lanes = len(arguments)
        self.note_resets(0, num_lanes)
        if self._threads is not None and num_lanes > 1:
            futures = {
                lane: self._threads.submit(self.envs[lane].reset, **own)
                for lane, own in arguments.items()
            }
            for num_done, _ in enumerate(as_completed(futures.values()), 1):
                self.note_resets(num_done, num_lanes)
            return {lane: future.result for lane, future in futures.items()}

        def reset(lane: int, number: int) -> tuple[Any, dict[str, Any]]:
            first = self.envs[lane].reset(**arguments[lane])
            self.note_resets(number, num_lanes)
            return first

        return {lane: partial(reset, lane, number) for number, lane in enumerate(arguments, 1)}

    def step_columns(self, actions: Sequence[Column], lanes: Sequence[int] = ()) -> dict[str, Any]:
        """Step lanes; ``flush`` then writes the observations.

        Args:
            actions: Columns with a row for each stepped lane.
            lanes: All different, where they have no autoreset; empty: all lanes. The other lanes
                and their ``results`` are unchanged.

        Returns:
            The infos of the stepped lanes, in the form of gymnasium's vectors.
        """
        infos: dict[str, Any] = {}
        fresh: list[object] = []
        rewards: list[Any] = []
        stepped = lanes or range(self.num_envs)
        where: Any = list(lanes) if lanes else ...
        terminated, truncated = self.results.terminated, self.results.truncated
        terminated[where] = truncated[where] = False
        self._fresh_lanes, self._fresh = stepped, fresh
        self.final_infos = {}
        due = [lane for lane, has_ended in enumerate(self._has_ended) if has_ended]
        resets = self._resets({lane: {} for lane in due}) if due and self._autoresets else {}
        for lane, action in zip(stepped, by_lane(self._action_spec, actions), strict=True):
            if lane not in resets:
                env = self.envs[lane]
                observation, reward, is_terminated, is_truncated, info = env.step(action)
                if is_terminated or is_truncated:
                    terminated[lane], truncated[lane] = is_terminated, is_truncated
                    self._has_ended[lane] = True
                    self.final_infos[lane] = info
            else:
                observation, info = resets[lane]()
                reward = 0.0
                self._has_ended[lane] = False
            if info:
                merge_info(self._add_info, infos, info, lane, self.num_envs)
            fresh.append(observation)
            rewards.append(reward)
        self._rewards = rewards
        try:
            self.results.rewards[where] = rewards
        except (TypeError, ValueError):  # one is an array of one element, say
            for lane, reward in zip(stepped, rewards, strict=True):
                self.results.rewards[lane] = reward
        return infos

    def flush(self) -> None:
        """Write the observations of the last step or reset into ``observations``.

        Raises ConformanceError where one has another structure, shape or dtype than its space; the
        columns may hold some of the others by then.
        """
        try:
            parts = by_leaf(self._spec, self._fresh)
            for position, (leaf, values) in enumerate(zip(self._leaves, parts, strict=True)):
                self.observations[position] = write_lane_values(
                    leaf, self.observations[position], self._fresh_lanes, values
                )
        except ConformanceError as error:
            raise self._with_lane(error) from error

    def _with_lane(self, error: ConformanceError) -> ConformanceError:
        """Return the error of the first lane whose observation does not conform, with its lane."""
        for lane, observation in zip(self._fresh_lanes, self._fresh, strict=True):
            try:
                for leaf, value in zip(self._leaves, flatten(self._spec, observation), strict=True):
                    coerce(leaf, value, None)
            except ConformanceError as own:
                return ConformanceError(own.kind, own.path, f"{own.reason} (lane {lane})", lane)
        return error

    def call_lanes(
        self, name: str, arguments: Sequence[object], lanes: Sequence[int]
    ) -> list[object]:
        """Call or read attribute ``name`` of the environment, or its wrappers, in each lane.

        Each lane gets a copy of the arguments; without any, what is not callable is read. If a
        lane raises, those before it have been called; before MissingAttributeError no lane is.
        """
        try:
            attributes = [self.envs[lane].get_wrapper_attr(name) for lane in lanes]
        except AttributeError as error:
            raise MissingAttributeError(str(error)) from error
        results: list[object] = []
        for attribute in attributes:
            is_read = not arguments and not callable(attribute)
            results.append(attribute if is_read else attribute(*copy.deepcopy(arguments)))
        return results

    def render_lanes(self, lanes: Sequence[int]) -> tuple[Any, ...]:
        return tuple(self.envs[lane].render() for lane in lanes)

    def close_extras(self, **kwargs: Any) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        for env in self.envs:
            env.close()  # type: ignore[no-untyped-call]  # gymnasium leaves it untyped

    def _copied_observation(self) -> Any:
        self.flush()
        copies = [
            column if isinstance(column, tuple) else column.copy() for column in self.observations
        ]
        return unflatten(self._spec, copies)


def _check_lanes(envs: Sequence[gymnasium.Env[Any, Any]]) -> None:
    if len({id(env) for env in envs}) < len(envs):
        raise ConfigurationError(
            "the factory returned the same environment for several lanes; it must create a new "
            "environment on every call"
        )
    first = envs[0]
    for lane, env in enumerate(envs):
        for kind in ("observation_space", "action_space"):
            if getattr(env, kind) != getattr(first, kind):
                raise ConfigurationError(
                    f"lane {lane} has {kind} {getattr(env, kind)}, lane 0 has "
                    f"{getattr(first, kind)}; the lanes of a vector need equal spaces"
                )


BAD_VALUE_KEY = "rlmesh_ray.bad_value"
"""Key in the last info of an episode that was truncated at a bad value: the reason as text."""


class TruncateOnBadValue(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Truncates an episode at an observation that would be refused, or a reward that is not finite.

    That step returns the last good observation instead, the reward if it is finite and else 0.0,
    and the reason in its info. Two kinds of bad observations are returned unchanged: the first of
    an episode, since there is no former one, and one of a wrong shape or structure, which is a bug
    of the environment. ``validation`` is the endpoint's mode, which decides what is bad.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], validation: ValidationMode, lane: int) -> None:
        super().__init__(env)
        self._lane = lane
        self._step_count = 0
        self._spec = from_gymnasium(env.observation_space)
        self._checker = Checker(leaves(self._spec), validation)
        self._last_good: Any = None
        self._found: list[ConformanceWarning] = []

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._step_count = 0
        self._found.clear()
        is_good = self._bad_observation(observation) is None
        self._last_good = copy.deepcopy(observation) if is_good else None
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take a step; truncate the episode at a bad value. Raises TypeError for no reward."""
        observation, reward, is_terminated, is_truncated, info = self.env.step(action)
        self._step_count += 1
        if reward is None:
            raise TypeError("step() returned None as the reward; return a number")
        is_finite = math.isfinite(reward)
        found = self._bad_observation(observation)
        if found is None and not is_finite:
            agents = self.env.agents_without_reward if isinstance(self.env, MultiAgentLane) else ""
            place = f"lane 0, {agents}" if agents else "lane 0"
            found = self._warning("reward", "", f"{float(reward)} is not finite ({place})")
        if found is None:
            self._last_good = copy.deepcopy(observation)
        if found is None or self._last_good is None:
            return observation, reward, is_terminated, is_truncated, info
        self._found.append(found)
        info = {**(info or {}), BAD_VALUE_KEY: found.text}
        return self._ending(observation), reward if is_finite else 0.0, False, True, info

    def take_found(self) -> list[ConformanceWarning]:
        found, self._found = self._found, []
        return found

    def _bad_observation(self, observation: Any) -> ConformanceWarning | None:
        try:
            self._checker.check(stack(self._spec, [observation]))
        except ConformanceError as error:
            # Errors of shape and structure have no lane; those of values have one.
            is_bug = error.kind == "structure" and error.lane is None
            return None if is_bug else self._warning("observation", error.path, error.reason)
        return None

    def _warning(self, side: str, path: str, reason: str) -> ConformanceWarning:
        place = reason.replace("(lane 0", f"(lane {self._lane}")  # checked as a batch of one lane
        message = f"{place}, at step {self._step_count}: the episode was truncated"
        return ConformanceWarning(side, "truncated", path, message, self._lane)

    def _ending(self, observation: Any) -> Any:
        last = copy.deepcopy(self._last_good)
        if isinstance(self.env, MultiAgentLane):
            # The agents' rewards are part of the observation; those of this step count.
            rewards = observation[REWARDS]
            last[REWARDS] = np.where(np.isfinite(rewards), rewards, 0.0)
        return last
