"""Whether a runner's lanes can be treated as arrays: only where nobody could tell."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
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
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
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

from rlmesh_ray.rllib.config.tune_params import is_tune_param

_TO_MODULE = (
    AddObservationsFromEpisodesToBatch,
    AddTimeDimToBatchAndZeroPad,
    AddStatesFromEpisodesToBatch,
    BatchIndividualItems,
    NumpyToTensor,
)
_FLATTENING = (FlattenObservations, *_TO_MODULE)
_TO_ENV = (
    GetActions,
    TensorToNumpy,
    UnBatchToIndividualItems,
    RemoveSingleTsTimeRankFromBatch,
    NormalizeAndClipActions,
    ListifyDataForVectorEnv,
)
_PIPELINES = (EnvToModulePipeline, ModuleToEnvPipeline)
_EXCEPTIONS = {
    "env_to_module": ", unless it gives FlattenObservations alone",
    "module_to_env": "",
}
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
_FLATTENED = _ACTIONS
"""What FlattenObservations makes one array of, in a batch as for single lanes."""

Space = gymnasium.Space[Any]


def ineligibility(runner: Any) -> str | None:
    """Return why a SingleAgentEnvRunner's lanes cannot be treated as arrays; None: they can.

    Everything that would see single episodes between two steps is one, since there are none.
    """
    if runner.module is None:
        return "there is no module"
    if runner.module.is_stateful():
        return "the module has a state"
    if not runner.episodes_to_numpy:
        return "episodes_to_numpy is off"
    return (
        _custom_connector(runner)
        or _observations(runner)
        or _no_arrays(runner.env.single_action_space, _ACTIONS)
        or _episode_callback(runner.config, [type(callbacks) for callbacks in runner._callbacks])
    )


def config_ineligibility(config: AlgorithmConfig, observation: Space, action: Space) -> str | None:
    """Return what in a config makes ``ineligibility`` say no, before there is a runner.

    What a module of the user's keeps, and what his connectors come to, only runners find out.

    Args:
        config: As it is now.
        observation: Space of one lane.
        action: Likewise.
    """
    if not is_tune_param(config, "_model_config", "_rl_module_spec"):
        spec, settings = config._rl_module_spec, config.model_config
        is_default = spec is None or getattr(spec, "module_class", None) is None
        if is_default and settings.get("use_lstm"):
            return "the module has a state (use_lstm)"
    if not config.episodes_to_numpy:
        return "episodes_to_numpy is off"
    for kind in ("env_to_module", "module_to_env"):
        if getattr(config, f"_{kind}_connector") is not None:
            return f"env_runners({kind}_connector=...) is set{_EXCEPTIONS[kind]}"
        if not getattr(config, f"add_default_connectors_to_{kind}_pipeline"):
            return f"env_runners(add_default_connectors_to_{kind}_pipeline=False) is set"
    kinds = config.callbacks_class
    kinds = kinds if isinstance(kinds, list | tuple) else [kinds]
    return (
        _no_arrays(observation, _OBSERVATIONS)
        or _no_arrays(action, _ACTIONS)
        or _episode_callback(config, kinds)
    )


def flattener_of(runner: Any) -> FlattenObservations | None:
    """Return what flattens observations before all else in a runner's pipeline, if it does so."""
    first = runner._env_to_module.connectors[0]
    return first if type(first) is FlattenObservations else None


def _observations(runner: Any) -> str | None:
    flattener = flattener_of(runner)
    if flattener is None:
        return _no_arrays(runner.env.single_observation_space, _OBSERVATIONS)
    if flattener._multi_agent or flattener._as_learner_connector:
        return "FlattenObservations is set up for several agents or for a learner"
    for space in tree.flatten(flattener._input_obs_base_struct):
        if isinstance(space, gymnasium.spaces.Discrete) and space.start != 0:
            return f"FlattenObservations encodes other values than those of {space}"
        why = _no_arrays(space, _FLATTENED)
        if why:
            return why
    return None


def _no_arrays(space: Space, kinds: Sequence[type[Space]]) -> str | None:
    if type(space) in kinds:
        return None
    return f"{type(space).__name__} is not a space whose values are arrays"


def _custom_connector(runner: Any) -> str | None:
    for kind, pipeline, default, other in (
        ("env_to_module", runner._env_to_module, _TO_MODULE, _FLATTENING),
        ("module_to_env", runner._module_to_env, _TO_ENV, _TO_ENV),
    ):
        own = tuple(type(piece) for piece in getattr(pipeline, "connectors", ()))
        if type(pipeline) not in _PIPELINES:
            return f"{type(pipeline).__name__} is not RLlib's own"
        if own not in (default, other):
            others = sorted({piece.__name__ for piece in own} - {one.__name__ for one in other})
            named = f": it has {', '.join(others)}" if others else ""
            return f"the {kind} pipeline is not RLlib's default{named}"
    return None


def _episode_callback(config: AlgorithmConfig, kinds: Sequence[type[Any]]) -> str | None:
    for name in _EPISODE_CALLBACKS:
        if getattr(config, f"callbacks_{name}"):
            return f"there is a callback {name}"
        for kind in kinds:
            if getattr(kind, name, None) is not getattr(RLlibCallback, name):
                return f"{getattr(kind, '__name__', kind)} has a callback {name}"
    return None
