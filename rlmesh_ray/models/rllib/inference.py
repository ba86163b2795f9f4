"""Inference of a served RLlib policy: on arrays where that gives the same, else on episodes."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import unbatch
from tree import flatten, map_structure

from rlmesh_ray.models.fast_path.action_sampling import as_arrays
from rlmesh_ray.models.fast_path.array_connectors import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    ArrayConnectors,
    connector_types,
)
from rlmesh_ray.models.nan_rows import IsNan, nan_rows, refused_rows, zeroed
from rlmesh_ray.models.policy import Rows
from rlmesh_ray.models.recurrent.lane_states import EpisodeStates
from rlmesh_ray.models.rllib.checkpoint import CheckpointParts
from rlmesh_ray.models.rllib.forward import BucketedForward
from rlmesh_ray.models.rllib.weights import RllibWeights

# Episodes grow by one step a row; cutting costs as much as a few steps.
STEPS_BETWEEN_CUTS = 16
# The columns of a module's output that become actions, or state.
_ACTED_ON = {
    Columns.ACTION_DIST_INPUTS,
    Columns.ACTIONS,
    Columns.ACTIONS_FOR_ENV,
    Columns.STATE_OUT,
}


class InferenceResult(NamedTuple):
    """The actions for a batch of rows."""

    actions: object
    """A batch, one for each row."""
    is_nan: IsNan | None
    """Rows for which the module's output was NaN: their actions are invalid, and the states of all
    lanes of their requests unchanged. None: there are no such rows."""


class RllibInference(Protocol):
    """Acts on batches of rows."""

    def act(self, rows: Rows) -> InferenceResult:
        """Choose one action for each row. If it raises, the states of lanes are unchanged."""

    def forget(self, route_key: str, env_index: int | None) -> None:
        """Free the state of a lane, or of all lanes of a route."""


@dataclass(frozen=True, slots=True)
class ModuleRunner:
    """Runs the module of a policy, and handles NaN in its output."""

    forward: BucketedForward
    weights: RllibWeights
    explore: bool

    def __call__(self, batch: dict[str, Any]) -> tuple[dict[str, Any], IsNan | None]:
        """Return the module's outputs, and the rows that had NaN, which is replaced by zeros.

        Sampling fails for all rows if one has NaN.
        """
        outputs = self.forward(batch, self.weights.env_steps)
        acted_on = {key: outputs[key] for key in _ACTED_ON & outputs.keys()}
        is_nan = nan_rows(flatten(acted_on))
        if is_nan is not None:
            outputs |= map_structure(lambda output: zeroed(output, is_nan), acted_on)
        return outputs, is_nan


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
    """

    def __init__(self, parts: CheckpointParts, run: ModuleRunner) -> None:
        self._run = run
        self._connectors = ArrayConnectors(
            parts.env_to_module, parts.module_to_env, parts.module, parts.spaces[1]
        )

    def act(self, rows: Rows) -> InferenceResult:
        """See ``RllibInference``."""
        given = rows.observations
        is_array = isinstance(given, np.ndarray)
        observations = _writable(given) if is_array else map_structure(_writable, given)
        outputs, is_nan = self._run(self._connectors.to_module(observations))
        self._connectors.add_actions(outputs, explore=self._run.explore)
        kept = {Columns.ACTIONS, Columns.ACTIONS_FOR_ENV} & outputs.keys()
        arrays = as_arrays({key: outputs[key] for key in kept})
        return InferenceResult(self._connectors.actions_for_env(arrays), is_nan)

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
        """Add the next observation, and the action that led to it."""
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
        """Store the action for the latest observation."""
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
    """Any pipeline and any module, on episodes, as RLlib's EnvRunner calls them."""

    def __init__(self, parts: CheckpointParts, run: ModuleRunner) -> None:
        self._parts = parts
        self._run = run
        self._shared_data: dict[str, Any] = {}
        self._lanes = EpisodeStates(self._fresh_lane)

    def act(self, rows: Rows) -> InferenceResult:
        """See ``RllibInference``; connectors with a state may have changed it.

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
        """See ``RllibInference``."""
        self._lanes.forget(route_key, env_index)

    def _act(self, lanes: Sequence[_LaneEpisode], rows: Rows) -> InferenceResult:
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
        return InferenceResult(actions_for_env, is_nan)

    def _fresh_lane(self) -> _LaneEpisode:
        return _LaneEpisode(_fresh_episode(*self._parts.spaces))

    def _outputs(
        self, episodes: list[Any], observations: list[Any]
    ) -> tuple[dict[str, Any], IsNan | None]:
        context = {
            "rl_module": self._parts.module,
            "episodes": episodes,
            "explore": self._run.explore,
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
