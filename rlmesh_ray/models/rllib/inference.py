"""Inference of a served RLlib policy: on arrays where that gives the same, else on episodes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import unbatch
from tree import map_structure

from rlmesh_ray.models.fast_path.action_sampling import as_arrays
from rlmesh_ray.models.fast_path.array_connectors import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    ArrayConnectors,
    connector_types,
)
from rlmesh_ray.models.lane_states import EpisodeStates
from rlmesh_ray.models.nan_rows import IsNan, refused_rows
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.models.rllib.checkpoint import CheckpointParts

# Episodes grow by one step a row; cutting costs as much as a few steps.
STEPS_BETWEEN_CUTS = 16
RunModule = Callable[[dict[str, Any]], tuple[dict[str, Any], IsNan | None]]
"""Runs the policy's module: from a batch to its outputs, and the rows that had NaN in them.

Rows with NaN are zeros in the outputs: sampling fails for all rows if one has NaN."""
Acted = tuple[object, IsNan | None]
"""A batch of actions, one for each row; and the rows for which the module's output was NaN: their
actions are invalid, and the states of all lanes of their requests unchanged. None: there are no
such rows."""


def allows_arrays(parts: CheckpointParts) -> bool:
    """Return whether ``ArrayInference`` chooses the same actions as ``EpisodeInference``."""
    return (
        not parts.module.is_stateful()
        and connector_types(parts.env_to_module) == DEFAULT_ENV_TO_MODULE
        and connector_types(parts.module_to_env) == DEFAULT_MODULE_TO_ENV
    )


class ArrayInference:
    """A module without state between RLlib's default connectors, on whole arrays.

    Args:
        parts: What the checkpoint holds; see ``allows_arrays``.
        run: Runs its module.
        explore: Whether to sample actions instead of taking the likeliest.
    """

    def __init__(self, parts: CheckpointParts, run: RunModule, *, explore: bool) -> None:
        self._run, self._explore = run, explore
        self._connectors = ArrayConnectors(
            parts.env_to_module, parts.module_to_env, parts.module, parts.spaces[1]
        )

    def act(self, rows: Rows) -> Acted:
        given = rows.observations
        is_array = isinstance(given, np.ndarray)
        observations = _writable(given) if is_array else map_structure(_writable, given)
        outputs, is_nan = self._run(self._connectors.to_module(observations))
        self._connectors.add_actions(outputs, explore=self._explore)
        kept = {Columns.ACTIONS, Columns.ACTIONS_FOR_ENV} & outputs.keys()
        arrays = as_arrays({key: outputs[key] for key in kept})
        return self._connectors.actions_for_env(arrays), is_nan

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Do nothing: this keeps no state of lanes."""


def _writable(column: Any) -> Any:
    """Return a writable array, a copy if needed: received values are read-only, unlike tensors."""
    return np.require(column, requirements=["C", "W"])


@dataclass(slots=True)
class _LaneEpisode:
    """The running episode of a lane, and the module's last output."""

    episode: Any
    num_kept: int | None = None
    """Number of its steps for which actions were chosen; None: not even for the first observation.
    """
    action: Any = None
    outputs: dict[str, Any] = field(default_factory=dict)

    def advance(self, observation: Any) -> None:
        if not self.episode.is_reset:
            self.episode.add_env_reset(observation=observation, infos={})
        else:
            self.episode.add_env_step(
                observation=observation,
                action=self.action,
                reward=0.0,
                infos={},
                extra_model_outputs=self.outputs,
            )

    def keep(self, action: Any, outputs: dict[str, Any], lookback: int) -> None:
        self.action, self.outputs = action, outputs
        if len(self.episode) >= STEPS_BETWEEN_CUTS:
            self.episode = self.episode.cut(len_lookback_buffer=lookback)
        self.num_kept = len(self.episode)

    def undo(self) -> None:
        """Remove an observation for which no action was chosen, if there is one."""
        now = self.episode
        if self.num_kept is None:
            self.episode = _fresh_episode(now.observation_space, now.action_space)
        else:
            self.episode = now.slice(slice(0, self.num_kept))
            self.episode.custom_data.update(now.custom_data)


class EpisodeInference:
    """Any pipeline and any module, on episodes, as RLlib's EnvRunner calls them.

    Args:
        parts: What the checkpoint holds.
        run: Runs its module.
        explore: As of ``ArrayInference``.
    """

    def __init__(self, parts: CheckpointParts, run: RunModule, *, explore: bool) -> None:
        self._parts = parts
        self._run, self._explore = run, explore
        self._shared_data: dict[str, Any] = {}
        self._lanes = EpisodeStates(self._fresh_lane)

    def act(self, rows: Rows) -> Acted:
        """Choose one action for each row.

        If it raises, the states of lanes are unchanged; connectors with a state may have changed
        it.

        Raises:
            PolicyError: A lane occurs twice.
        """
        lanes = self._lanes.of(rows)
        try:
            return self._act(lanes, rows)
        except Exception:
            for lane in lanes:
                lane.undo()
            raise

    def forget(self, route_key: str, env_index: int | None) -> None:
        self._lanes.forget(route_key, env_index)

    def _act(self, lanes: Sequence[_LaneEpisode], rows: Rows) -> Acted:
        observations = unbatch(rows.observations)
        for lane, observation in zip(lanes, observations, strict=True):
            lane.advance(observation)
        outputs, is_nan = self._outputs([lane.episode for lane in lanes], observations)
        actions = outputs.pop(Columns.ACTIONS)
        actions_for_env = outputs.pop(Columns.ACTIONS_FOR_ENV, actions)
        of_lanes = [
            (action, {key: column[row] for key, column in outputs.items()})
            for row, action in enumerate(unbatch(actions))
        ]
        is_lost = np.zeros(len(lanes), np.bool_) if is_nan is None else refused_rows(is_nan, rows)
        # The state of a lane is stored after all calls that can fail, for all lanes.
        for lane, of_lane, is_undone in list(zip(lanes, of_lanes, is_lost, strict=True)):
            if is_undone:
                lane.undo()
            else:
                lane.keep(*of_lane, self._parts.lookback)
        return actions_for_env, is_nan

    def _fresh_lane(self) -> _LaneEpisode:
        return _LaneEpisode(_fresh_episode(*self._parts.spaces))

    def _outputs(
        self, episodes: list[Any], observations: list[Any]
    ) -> tuple[dict[str, Any], IsNan | None]:
        context = {
            "rl_module": self._parts.module,
            "episodes": episodes,
            "explore": self._explore,
            "shared_data": self._shared_data,
            "metrics": None,
        }
        infos: list[dict[str, Any]] = [{} for _ in episodes]
        # Batched pieces take the observations from the arguments, not from the episodes.
        batch = self._parts.env_to_module(
            batch={}, **context, **{Columns.OBS: observations, Columns.INFOS: infos}
        )
        batch, is_nan = self._run(batch)
        return dict(self._parts.module_to_env(batch=batch, **context)), is_nan


def _fresh_episode(observation_space: Any, action_space: Any) -> Any:
    return SingleAgentEpisode(observation_space=observation_space, action_space=action_space)
