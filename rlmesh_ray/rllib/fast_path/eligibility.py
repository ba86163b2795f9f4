"""When a runner can take the fast path: only where the episodes are the same as RLlib's own."""

from collections.abc import Sequence
from typing import Any

import gymnasium
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import ModuleToEnvPipeline
from ray.rllib.utils import force_list

from rlmesh_ray.compat.rllib import (
    CONNECTORS,
    MODULE_SETTINGS,
    connector_of,
    module_spec_of,
)
from rlmesh_ray.models.fast_path.array_connectors import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    connector_types,
)
from rlmesh_ray.rllib.config.tune_params import is_tune_param

FAST_PATH_IS_OFF = "configure(fast_path=False) turned it off"
"""The reason why a runner whose plan says so does not take the fast path."""

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
"""Also spaces of which FlattenObservations makes one array, of a batch as of single lanes."""

Space = gymnasium.Space[Any]


def ineligibility(runner: Any) -> str | None:
    """Return why an RLMeshEnvRunner cannot take the fast path; None: it can.

    The fast path has no single episodes between two steps, so nothing may read or write them there.
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
    """Return the ``ineligibility`` that follows from a config alone, before there is a runner.

    Whether a module of the user's has a state, and which connectors a function of the user's makes,
    is known in the runner only.

    Args:
        config: As it is now.
        observation: Observation space of one lane.
        action: Action space of one lane.
    """
    if not is_tune_param(config, *MODULE_SETTINGS):
        spec, settings = module_spec_of(config), config.model_config
        is_default = spec is None or getattr(spec, "module_class", None) is None
        if is_default and settings.get("use_lstm"):
            return "the module has a state (use_lstm)"
    if not config.episodes_to_numpy:
        return "episodes_to_numpy is off"
    for kind in CONNECTORS:
        if connector_of(config, kind) is not None:
            return f"env_runners({kind}_connector=...) is set{_EXCEPTIONS[kind]}"
        if not getattr(config, f"add_default_connectors_to_{kind}_pipeline"):
            return f"env_runners(add_default_connectors_to_{kind}_pipeline=False) is set"
    return (
        _no_arrays(observation, _OBSERVATIONS)
        or _no_arrays(action, _ACTIONS)
        or _episode_callback(config, force_list(config.callbacks_class))
    )


def flattener_of(runner: Any) -> FlattenObservations | None:
    """Return the FlattenObservations that is the first connector of a runner; None: it is not."""
    first = runner.pipelines[0].connectors[0]
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
        reason = _no_arrays(space, _ACTIONS)
        if reason:
            return reason
    return None


def _no_arrays(space: Space, kinds: Sequence[type[Space]]) -> str | None:
    if type(space) in kinds:
        return None
    return f"{type(space).__name__} is not a space whose values are arrays"


def _custom_connector(runner: Any) -> str | None:
    flattening = (FlattenObservations, *DEFAULT_ENV_TO_MODULE)
    to_module, to_env = runner.pipelines
    for kind, pipeline, pipeline_type, allowed in (
        ("env_to_module", to_module, EnvToModulePipeline, (DEFAULT_ENV_TO_MODULE, flattening)),
        ("module_to_env", to_env, ModuleToEnvPipeline, (DEFAULT_MODULE_TO_ENV,)),
    ):
        if type(pipeline) is not pipeline_type:
            return f"{type(pipeline).__name__} is not RLlib's own"
        own = connector_types(pipeline)
        if own not in allowed:
            custom = sorted(
                {each.__name__ for each in own} - {each.__name__ for each in allowed[-1]}
            )
            named = f": it has {', '.join(custom)}" if custom else ""
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
