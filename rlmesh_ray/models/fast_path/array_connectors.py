"""RLlib's default connectors on whole arrays, for served policies and for runners."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from ray.rllib.connectors import env_to_module as to_module
from ray.rllib.connectors import module_to_env as to_env
from ray.rllib.core.columns import Columns
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unsquash_action,
)

from rlmesh_ray.models.fast_path.action_sampling import ActionSampler
from rlmesh_ray.models.fast_path.module_forward import batch_of
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec, DictSpec, TupleSpec

DEFAULT_ENV_TO_MODULE = (
    to_module.AddObservationsFromEpisodesToBatch,
    to_module.AddTimeDimToBatchAndZeroPad,
    to_module.AddStatesFromEpisodesToBatch,
    to_module.BatchIndividualItems,
    to_module.NumpyToTensor,
)
"""The connectors of RLlib's default env-to-module pipeline for one agent, in their order."""
DEFAULT_MODULE_TO_ENV = (
    to_env.GetActions,
    to_env.TensorToNumpy,
    to_env.UnBatchToIndividualItems,
    to_env.RemoveSingleTsTimeRankFromBatch,
    to_env.NormalizeAndClipActions,
    to_env.ListifyDataForVectorEnv,
)
"""The connectors of RLlib's default module-to-env pipeline for one agent, in their order."""
_FITTING = DEFAULT_MODULE_TO_ENV.index(to_env.NormalizeAndClipActions)


def connector_types(pipeline: Any) -> tuple[type, ...]:
    return tuple(type(piece) for piece in getattr(pipeline, "connectors", ()))


class ArrayConnectors:
    """RLlib's default connectors on whole arrays: the same results without a loop over lanes.

    Args:
        env_to_module: A pipeline that ends with ``DEFAULT_ENV_TO_MODULE``.
        module_to_env: A pipeline that is ``DEFAULT_MODULE_TO_ENV``.
        module: The RLModule between them, without a state.
        action_space: Action space of one lane.
    """

    def __init__(
        self, env_to_module: Any, module_to_env: Any, module: Any, action_space: Any
    ) -> None:
        self._device = env_to_module.connectors[-1]._device
        self._sampler = ActionSampler(module, module_to_env.connectors[0]._get_actions)
        fitting = module_to_env.connectors[_FITTING]
        self._action_struct = get_base_struct_from_space(action_space)
        # RLlib looks for a Box in each batch, and leaves all other actions as they are.
        spec = from_gymnasium(action_space)
        self._is_never_fitted = not isinstance(spec, (BoxSpec, DictSpec, TupleSpec))
        self._fit: Any = None
        if fitting.normalize_actions:
            self._fit = unsquash_action
        elif fitting.clip_actions:
            self._fit = clip_action

    def to_module(self, observations: Any) -> dict[str, Any]:
        """Return the forward pass's input; it may share the memory of ``observations``."""
        return batch_of(observations, self._device)

    def add_actions(self, output: dict[str, Any], *, explore: bool) -> None:
        self._sampler.add_to(output, explore=explore)

    def actions_for_env(self, arrays: Mapping[str, Any]) -> Any:
        """Return the actions for the environment: unsquashed or clipped, if RLlib does so.

        Args:
            arrays: The module's output with its actions; see ``as_arrays``.
        """
        actions = arrays[Columns.ACTIONS]
        if self._fit is None:
            return arrays.get(Columns.ACTIONS_FOR_ENV, actions)
        if self._is_never_fitted and type(actions) is np.ndarray:
            return actions
        return self._fit(actions, self._action_struct)
