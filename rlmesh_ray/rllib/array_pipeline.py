"""RLlib's default connectors for all lanes of a slot at once.

RLlib's own take the batch apart lane by lane and put it together again, which is most of the time
that sampling takes. What comes out here is the same, to the last bit; it is used only where that is
certain, see ``obstacle``.
"""

from typing import Any, NamedTuple

import gymnasium
import torch
from numpy.typing import NDArray
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.common.add_observations_from_episodes_to_batch import (
    AddObservationsFromEpisodesToBatch,
)
from ray.rllib.connectors.common.add_states_from_episodes_to_batch import (
    AddStatesFromEpisodesToBatch,
)
from ray.rllib.connectors.common.add_time_dim_to_batch_and_zero_pad import (
    AddTimeDimToBatchAndZeroPad,
)
from ray.rllib.connectors.common.batch_individual_items import BatchIndividualItems
from ray.rllib.connectors.common.numpy_to_tensor import NumpyToTensor
from ray.rllib.connectors.common.tensor_to_numpy import TensorToNumpy
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import (
    GetActions,
    ListifyDataForVectorEnv,
    ModuleToEnvPipeline,
    NormalizeAndClipActions,
    RemoveSingleTsTimeRankFromBatch,
    UnBatchToIndividualItems,
)
from ray.rllib.core.columns import Columns
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.spaces.space_utils import clip_action, unsquash_action
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

_TO_MODULE = (
    AddObservationsFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    AddStatesFromEpisodesToBatch,
    BatchIndividualItems,
    NumpyToTensor,
)
_TO_ENV = (
    GetActions,
    TensorToNumpy,
    UnBatchToIndividualItems,
    RemoveSingleTsTimeRankFromBatch,
    NormalizeAndClipActions,
    ListifyDataForVectorEnv,
)
_PIPELINES = (EnvToModulePipeline, ModuleToEnvPipeline)
_EPISODE_CALLBACKS = (
    "on_episode_created",
    "on_episode_start",
    "on_episode_step",
    "on_episode_end",
)
_OBSERVATIONS = (gymnasium.spaces.Box,)
_ACTIONS = (
    gymnasium.spaces.Box,
    gymnasium.spaces.Discrete,
    gymnasium.spaces.MultiDiscrete,
    gymnasium.spaces.MultiBinary,
)


def obstacle(runner: Any) -> str | None:
    """Return why a SingleAgentEnvRunner's lanes cannot be treated as arrays; None: they can.

    Everything that would see single episodes between two steps is one, since there are none.
    """
    if runner.module is None:
        return "there is no module"
    if runner.module.is_stateful():
        return "the module has a state"
    if not runner.episodes_to_numpy:
        return "episodes_to_numpy is off"
    return _structure(runner) or _stranger(runner) or _watcher(runner)


def _structure(runner: Any) -> str | None:
    for space, kinds in (
        (runner.env.single_observation_space, _OBSERVATIONS),
        (runner.env.single_action_space, _ACTIONS),
    ):
        if type(space) not in kinds:
            return f"{type(space).__name__} is not a space whose values are arrays"
    return None


def _stranger(runner: Any) -> str | None:
    for kind, pipeline, default in (
        ("env_to_module", runner._env_to_module, _TO_MODULE),
        ("module_to_env", runner._module_to_env, _TO_ENV),
    ):
        own = [type(piece) for piece in getattr(pipeline, "connectors", ())]
        if type(pipeline) not in _PIPELINES:
            return f"{type(pipeline).__name__} is not RLlib's own"
        if own != list(default):
            others = sorted({piece.__name__ for piece in own} - {one.__name__ for one in default})
            named = f": it has {', '.join(others)}" if others else ""
            return f"the {kind} pipeline is not RLlib's default{named}"
    return None


def _watcher(runner: Any) -> str | None:
    for name in _EPISODE_CALLBACKS:
        if getattr(runner.config, f"callbacks_{name}"):
            return f"there is a callback {name}"
        for callbacks in runner._callbacks:
            if getattr(type(callbacks), name) is not getattr(RLlibCallback, name):
                return f"{type(callbacks).__name__} has a callback {name}"
    return None


class Choice(NamedTuple):
    """What a module has chosen for all lanes; one row a lane everywhere."""

    actions: NDArray[Any]
    actions_for_env: NDArray[Any]
    extras: dict[str, Any]
    """Everything else that it gave: arrays, if the module is not a strange one."""


class ArrayPipeline:
    """From observations to actions, without episodes.

    Args:
        runner: One for which there is no ``obstacle``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._device = runner._env_to_module.connectors[-1]._device
        self._get_actions = runner._module_to_env.connectors[0]._get_actions
        self._space = runner.env.single_action_space

    def to_module(self, observations: NDArray[Any]) -> dict[str, torch.Tensor]:
        """Return the forward pass's input."""
        batch: dict[str, torch.Tensor] = convert_to_torch_tensor(
            {Columns.OBS: observations}, device=self._device
        )
        return batch

    def choose(self, output: dict[str, Any], *, explore: bool) -> Choice:
        """Return the actions that follow from the forward pass's output."""
        self._get_actions(output, self._runner.module, explore)
        arrays = convert_to_numpy(output)
        actions = arrays.pop(Columns.ACTIONS)
        fitted = arrays.pop(Columns.ACTIONS_FOR_ENV, actions)
        last = self._runner._module_to_env.connectors[-2]
        if last.normalize_actions:
            fitted = unsquash_action(actions, self._space)
        elif last.clip_actions:
            fitted = clip_action(actions, self._space)
        return Choice(actions, fitted, arrays)
