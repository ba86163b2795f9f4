"""VectorEnvAdapter: drives any gymnasium VectorEnv by columns."""

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from rlmesh_ray.envs.lane_vector_env import MissingAttributeError
from rlmesh_ray.errors import ConfigurationError, ConformanceError, RlmeshError
from rlmesh_ray.spaces.batch import Column, empty_columns, unflatten
from rlmesh_ray.spaces.contract import AutoresetMode
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.validation import coerce_batch
from rlmesh_ray.spaces.vector_infos import lane_info
from rlmesh_ray.transport.step_buffers import StepArrays

_LOG = logging.getLogger(__name__)

_LIST_TAKERS = (SyncVectorEnv, AsyncVectorEnv)
"""Vectors that accept a list of seeds: an error of their reset is no refusal of the list."""
_REFUSALS = (gymnasium.error.Error, TypeError, ValueError, AssertionError)
"""Errors of vectors that accept a single seed only."""


class VectorEnvAdapter:
    """Drives any VectorEnv, which it owns, by columns; the vector keeps its autoreset mode."""

    # As of LaneVectorEnv. Vectors do not report which lane raised, and return arrays of numbers.
    lane_in_progress: int | None = None
    lane_without_reward: int | None = None

    def __init__(self, vector: VectorEnv[Any, Any, Any]) -> None:
        self._vector = vector
        self._num_lanes = vector.num_envs
        self._spec = from_gymnasium(vector.single_observation_space)
        self._action_spec = from_gymnasium(vector.single_action_space)
        self._mode = autoreset_mode(vector)
        self._observation: Any = None
        # After a partial reset: the lanes whose observations must be unchanged.
        self._untouched: NDArray[np.intp] = np.arange(0)
        # As of LaneVectorEnv.
        self.final_infos: dict[int, dict[str, Any]] = {}
        self.observations: list[Column] = empty_columns(self._spec, self._num_lanes)
        self.results = StepArrays(
            np.zeros(self._num_lanes),
            np.zeros(self._num_lanes, bool),
            np.zeros(self._num_lanes, bool),
        )

    def reset_lanes(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int | None],
        options: Mapping[str, object] | None,
    ) -> dict[str, Any]:
        """Start new episodes; a partial reset passes gymnasium's ``options["reset_mask"]``."""
        mask = np.zeros(self._num_lanes, bool)
        mask[list(lanes)] = True
        by_lane: list[int | None] = [None] * self._num_lanes
        for lane, seed in zip(lanes, seeds, strict=False):
            by_lane[lane] = seed
        self._untouched = np.flatnonzero(~mask)
        own_options = None if options is None else dict(options)
        if not mask.all():
            own_options = {**(own_options or {}), "reset_mask": mask}
        self.final_infos = {}
        infos: dict[str, Any]
        self._observation, infos = self._reset_vector(by_lane, own_options)
        return infos

    def _reset_vector(self, seeds: list[int | None], options: dict[str, object] | None) -> Any:
        """Reset the vector with a list of seeds, as gymnasium's SyncVectorEnv accepts it.

        Array-based vectors, such as gymnasium's CartPoleVectorEnv, accept a single seed only. They
        get the first of consecutive seeds, which a client's ``reset(seed=7)`` sends as 7, 8, …
        """
        argument = None if all(seed is None for seed in seeds) else seeds
        first = seeds[0]
        is_consecutive = first is not None and seeds == list(range(first, first + len(seeds)))
        if not is_consecutive or isinstance(self._vector.unwrapped, _LIST_TAKERS):
            return self._reset_with(argument, options)
        try:
            return self._reset_with(argument, options)
        except _REFUSALS:
            return self._reset_with(first, options)

    def _reset_with(self, seed: Any, options: dict[str, object] | None) -> Any:
        # A copy: vectors remove the mask from the options.
        return self._vector.reset(seed=seed, options=None if options is None else dict(options))

    def step_columns(self, actions: Sequence[Column], lanes: Sequence[int] = ()) -> dict[str, Any]:
        if lanes:
            raise ConfigurationError(
                f"{self._vector} steps all of its lanes or none, not {list(lanes)}; serve single "
                "environments"
            )
        self._untouched = np.arange(0)
        self._observation, rewards, terminated, truncated, infos = self._vector.step(
            unflatten(self._action_spec, list(actions))
        )
        _copy(self.results.rewards, rewards, "rewards")
        _copy(self.results.terminated, terminated, "terminations")
        _copy(self.results.truncated, truncated, "truncations")
        self.final_infos = self._final_infos(infos)
        return infos

    def flush(self) -> None:
        try:
            columns = coerce_batch(self._spec, self._observation, self._num_lanes)
        except ConformanceError:
            if not self._store_rows():
                raise
            return
        for position, column in enumerate(columns):
            old = self.observations[position]
            if not all(np.array_equal(column[lane], old[lane]) for lane in self._untouched):
                raise RlmeshError(
                    f"{self._vector} has reset lanes that it was not asked to reset: it seems to "
                    "ignore options['reset_mask']; reset all lanes at once, or host single "
                    "environments"
                )
            if isinstance(old, tuple):
                self.observations[position] = column
            else:
                old[...] = column

    def _store_rows(self) -> bool:
        """Store EnvPool's result of a partial reset, rows of the reset lanes, if it is one."""
        lanes = np.setdiff1d(np.arange(self._num_lanes), self._untouched).tolist()
        try:
            columns = coerce_batch(self._spec, self._observation, len(lanes))
        except ConformanceError:
            return False
        for position, rows in enumerate(columns):
            old = self.observations[position]
            if isinstance(old, tuple):
                by_lane = dict(zip(lanes, rows, strict=True))
                self.observations[position] = tuple(
                    by_lane.get(lane, text) for lane, text in enumerate(old)
                )
            else:
                old[lanes] = rows
        return True

    def call_lanes(
        self, name: str, arguments: Sequence[object], lanes: Sequence[int]
    ) -> Sequence[object]:
        call = getattr(self._vector.unwrapped, "call", None)
        if not callable(call):
            raise ConfigurationError(
                f"{self._vector} has no call(name, *args), as gymnasium's SyncVectorEnv has it; "
                "give it one, or serve single environments with num_envs"
            )
        if sorted(lanes) != list(range(self._num_lanes)):
            raise ConfigurationError(
                f"{self._vector} calls all of its lanes or none; leave lanes out, give set_attr "
                "one value for all lanes, or serve single environments with num_envs"
            )
        try:
            results: Sequence[object] = call(name, *arguments)
        except AttributeError as error:
            # Python notes the name that was looked up; gymnasium's wrappers raise a second error.
            if name not in (error.name, getattr(error.__cause__, "name", None)):
                raise
            raise MissingAttributeError(str(error)) from error
        if len(results) != self._num_lanes:
            raise RlmeshError(
                f"{self._vector}.call({name!r}) gave {len(results)} results for "
                f"{self._num_lanes} lanes"
            )
        return [results[lane] for lane in lanes]

    def render_lanes(self, lanes: Sequence[int]) -> Any:
        """Return the frames of ``lanes``; the whole frame of a vector that renders only one."""
        render: Any = self._vector.render
        if "env_ids" in inspect.signature(render).parameters:  # EnvPool's default is one lane
            return render(env_ids=list(lanes))
        rendered: Any = render()
        has_one_a_lane = isinstance(rendered, (tuple, list)) or np.ndim(rendered) == 4
        if rendered is None or not has_one_a_lane or len(rendered) != self._num_lanes:
            return rendered
        return tuple(rendered[lane] for lane in lanes)

    def close(self) -> None:
        self._vector.close()

    def _final_infos(self, infos: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        ended = np.flatnonzero(self.results.terminated | self.results.truncated).tolist()
        if self._mode is AutoresetMode.SAME_STEP:
            # The other infos are already those of the next episode.
            infos = infos.get("final_info", {})
        return {lane: lane_info(infos, lane) for lane in ended}


def autoreset_mode(vector: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    declared = vector.metadata.get("autoreset_mode")
    if declared is None:
        # Gymnasium, since 1.1, requires the declaration and documents next-step as the default;
        # its RecordEpisodeStatistics assumes next-step without it, too.
        _LOG.warning(
            "%s does not declare metadata['autoreset_mode']; taking it for NEXT_STEP", vector
        )
        return AutoresetMode.NEXT_STEP
    try:
        return AutoresetMode(getattr(declared, "value", declared))
    except ValueError as error:
        raise ConfigurationError(
            f"{vector} declares metadata['autoreset_mode'] = {declared!r}; it must be a "
            "gymnasium.vector.AutoresetMode"
        ) from error


def id_of(env: object) -> str | None:
    """Return the id in the spec of ``env``; None where there is none, as in EnvPool's specs."""
    found = getattr(getattr(env, "spec", None), "id", None)
    return found if isinstance(found, str) else None


def _copy(target: NDArray[Any], source: Any, name: str) -> None:
    if np.shape(source) != target.shape:
        raise ConfigurationError(
            f"step returned {name} of shape {np.shape(source)}; a vector of {len(target)} lanes "
            f"needs {target.shape}"
        )
    np.copyto(target, source)
