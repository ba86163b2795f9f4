"""Check that RLlib's default modules accept the spaces of an environment, and can be compiled."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.utils.spaces.space_utils import get_dummy_batch_for_space
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rlmesh_ray.compat.rllib import (
    CONNECTORS,
    MODULE_SETTINGS,
    connector_of,
    module_spec_of,
)
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.inference_choice import InferenceChoice
from rlmesh_ray.models.rllib.compiled_module import CompiledModule
from rlmesh_ray.models.rllib.forward import compiled_forward
from rlmesh_ray.rllib.config.runner_choice import RunnerChoice
from rlmesh_ray.rllib.config.tune_params import is_tune_param
from rlmesh_ray.rllib.fast_path.eligibility import config_ineligibility
from rlmesh_ray.spaces.contract import EnvContract

Space = gymnasium.Space[Any]
Spaces = tuple[Space, Space]
"""Of observations and of actions."""

_FROM_ZERO = "wrap the environment so that its Discrete spaces begin at 0"
_OWN_ACTIONS = "env_runners(module_to_env_connector=...)"
_OWN_MODULE = "rl_module(rl_module_spec=...)"
_OWN_OBSERVATIONS = "env_runners(env_to_module_connector=...)"
_AS_FLOATS = (
    f"before configure, set {_OWN_OBSERVATIONS} to RLlib's FlattenObservations, which makes floats "
    f"of integers, or to a connector of your own, or set {_OWN_MODULE}"
)
_FLOATS_OF_PIXELS = (
    f"before configure, set {_OWN_OBSERVATIONS} to a connector that makes floats of the pixels, so "
    f"that they still travel as bytes, or set {_OWN_MODULE}; docs/how_to/train_from_images.md has "
    "both"
)
_FILTERS = (
    "before configure, set rl_module(model_config=DefaultModelConfig(conv_filters=...)), as "
    f"docs/how_to/train_from_images.md does, or {_OWN_OBSERVATIONS} to RLlib's "
    "FlattenObservations, which needs no CNN"
)


def require_module(config: AlgorithmConfig, contract: EnvContract, choice: RunnerChoice) -> None:
    """Make RLlib's default modules for these spaces, as its runners will, to check that it works.

    Custom modules and connectors are not checked: their requirements are unknown. Neither are
    settings of the module that Tune has yet to choose.

    Raises:
        ConfigurationError: RLlib has no default module for these spaces, or one that would act
            outside the action space.
    """
    if choice.is_multi_agent and not config.is_multi_agent:
        return  # RLlib raises a clear error
    if not _uses_default_module(config) or connector_of(config, "module_to_env") is not None:
        return
    refused = partial(_refused, config, contract)
    for owner, spaces in _by_agent(choice):
        _require_actions(spaces, partial(refused, owner, spaces), config)
    if connector_of(config, "env_to_module") is None:
        _require_modules(config, choice, refused)


def _refused(
    config: AlgorithmConfig,
    contract: EnvContract,
    owner: str,
    spaces: Spaces,
    reason: Exception | str,
    remedy: str,
) -> ConfigurationError:
    """Return the error of a default module that does not fit.

    Args:
        config: The config.
        contract: The contract of the endpoints.
        owner: The agent or policy that has the spaces; empty where there is one agent.
        spaces: Its spaces.
        reason: RLlib's error, or a text.
        remedy: What to do about it.
    """
    observation, action = map(_short, spaces)
    owner = f" ({owner})" if owner else ""
    if isinstance(reason, Exception):
        # Its first line.
        reason = str(reason).splitlines()[0].rstrip(".") if str(reason) else type(reason).__name__
    return ConfigurationError(
        f"RLlib's default module for {config.algo_class.__name__} does not fit "
        f"{contract.id}{owner}, with observations {observation} and actions {action}: {reason}; "
        f"{remedy}"
    )


def _short(space: Space) -> str:
    text = str(space)
    return text if len(text) <= 120 else f"{text[:117]}..."


def require_compilable(config: AlgorithmConfig, choice: RunnerChoice, *, fast_path: bool) -> None:
    """Compile RLlib's default module, as runners do with ``inference="compiled"``.

    Other modules, those with a state or behind custom connectors, are compiled in runners only.

    Raises:
        ConfigurationError: That is impossible.
    """
    if choice.is_multi_agent:
        raise ConfigurationError(
            'inference="compiled" is impossible: the policies of several agents run in torch; use '
            '"auto" or "torch"'
        )
    are_default = all(connector_of(config, kind) is None for kind in CONNECTORS)
    if not (are_default and _uses_default_module(config)):
        return
    observation, action = choice.observation_space, choice.action_space
    is_fast = fast_path and config_ineligibility(config, observation, action) is None
    rows = get_dummy_batch_for_space(observation, fill_value=0, batch_size=1)
    explored = {config.explore, (config.evaluation_config or {}).get("explore", config.explore)}
    with torch.random.fork_rng(devices=[]):  # as below
        specs = config.get_multi_rl_module_spec(spaces=_by_module(config, choice))
        module = specs.rl_module_specs[DEFAULT_MODULE_ID].build()
        for explore in () if module.is_stateful() else explored:
            if is_fast:
                made = partial(CompiledModule, module, explore=bool(explore), seed=None)
                InferenceChoice("compiled", made).prepare(rows)
            else:
                of_batch = partial(compiled_forward, module, explore=bool(explore))
                batch = convert_to_torch_tensor({Columns.OBS: rows})
                InferenceChoice("compiled", of_batch).prepare(batch)


def _uses_default_module(config: AlgorithmConfig) -> bool:
    name = "get_default_rl_module_spec"
    owner = next(kind for kind in type(config).__mro__ if name in vars(kind))
    if owner is AlgorithmConfig or not owner.__module__.startswith("ray.rllib."):
        return False
    if is_tune_param(config, *MODULE_SETTINGS):
        return False
    spec = module_spec_of(config)
    return spec is None or (
        isinstance(spec, RLModuleSpec)
        and spec.module_class is None
        and spec.catalog_class is None
        and spec.observation_space is None
        and spec.action_space is None
    )


def _require_actions(
    spaces: Spaces, refused: Callable[[str, str], ConfigurationError], config: AlgorithmConfig
) -> None:
    if isinstance(config, DQNConfig) and not isinstance(spaces[1], gymnasium.spaces.Discrete):
        remedy = f"wrap the environment, or, before configure, set {_OWN_MODULE}"
        raise refused("it takes Discrete actions only", remedy)
    for leaf in _leaves(spaces[1]):
        if isinstance(leaf, gymnasium.spaces.Discrete) and leaf.start:
            first, count = int(leaf.start), int(leaf.n)
            reason = (
                f"it numbers actions from 0, not from {first}, and would send 0 to "
                f"{count - 1} where the environment takes {first} to {first + count - 1}"
            )
            remedy = f"{_FROM_ZERO}, or, before configure, set {_OWN_ACTIONS} or {_OWN_MODULE}"
            raise refused(reason, remedy)
        if isinstance(leaf, gymnasium.spaces.Text):
            remedy = "wrap the environment so that it takes numbers"
            raise refused("RLlib has no actions of Text", remedy)


def _require_modules(
    config: AlgorithmConfig, choice: RunnerChoice, refused: Callable[..., ConfigurationError]
) -> None:
    try:
        by_module = _by_module(config, choice)
        specs = config.get_multi_rl_module_spec(spaces=by_module, inference_only=True)
    except Exception as error:  # RLlib would raise the same error later
        whole = (choice.observation_space, choice.action_space)
        remedy = "see to it in multi_agent(policies=..., policy_mapping_fn=...)"
        raise refused("", whole, error, remedy) from error
    for module_id, spec in specs.rl_module_specs.items():
        spaces = (spec.observation_space, spec.action_space)
        owner = f"policy {module_id!r}" if choice.is_multi_agent else ""
        remedy = _remedy(spaces[0])
        try:
            # This check must not change the random numbers of the user's program.
            with torch.random.fork_rng(devices=[]):
                module = spec.build()
            remedy = _FLOATS_OF_PIXELS if _is_pixels(spaces[0]) else _AS_FLOATS
            _show_zeros(module, spaces[0])
        except Exception as error:  # as above
            raise refused(owner, spaces, error, remedy) from error


def _show_zeros(module: RLModule, observation: Space) -> None:
    if module.is_stateful():
        return
    zeros = get_dummy_batch_for_space(observation, fill_value=0, batch_size=1)
    with torch.inference_mode():
        module.forward_inference(convert_to_torch_tensor({Columns.OBS: zeros}))


def _is_index(leaf: Space) -> bool:
    """Return whether RLlib makes distinct one-hot vectors of all values, negative ones included."""
    if not isinstance(leaf, gymnasium.spaces.Discrete):
        return True
    return -int(leaf.n) <= int(leaf.start) <= 0


def _is_pixels(observation: Space) -> bool:
    return _is_image(observation) and observation.dtype == np.uint8


def _is_image(observation: Space) -> bool:
    """Return whether RLlib's default module would be a CNN."""
    return isinstance(observation, gymnasium.spaces.Box) and len(observation.shape) == 3


def _remedy(observation: Space) -> str:
    if _is_image(observation):
        return _FILTERS
    parts = list(_leaves(observation))
    if any(isinstance(part, gymnasium.spaces.Text) for part in parts):
        return (
            "RLlib has no encoder for Text: wrap the environment so that it gives numbers, or, "
            f"before configure, set {_OWN_OBSERVATIONS} to a connector that makes numbers of it"
        )
    if not all(map(_is_index, parts)):
        return (
            f"{_FROM_ZERO}, as RLlib's FlattenObservations takes them, or, before configure, set "
            f"{_OWN_OBSERVATIONS} to a connector that takes the start away"
        )
    return (
        f"wrap the environment, or, before configure, set {_OWN_MODULE} or {_OWN_OBSERVATIONS}, "
        "such as RLlib's FlattenObservations"
    )


def _by_agent(choice: RunnerChoice) -> Iterator[tuple[str, Spaces]]:
    observations, actions = choice.observation_space, choice.action_space
    if not choice.is_multi_agent:
        yield "", (observations, actions)
        return
    assert isinstance(observations, gymnasium.spaces.Dict)
    assert isinstance(actions, gymnasium.spaces.Dict)
    for agent, observation in observations.items():
        yield f"agent {agent!r}", (observation, actions[agent])


def _by_module(config: AlgorithmConfig, choice: RunnerChoice) -> dict[str, Spaces]:
    """Return the spaces of each module, without custom connectors."""
    if not choice.is_multi_agent:
        return {DEFAULT_MODULE_ID: (choice.observation_space, choice.action_space)}
    pipeline = config.build_env_to_module_connector(spaces=_env_spaces(choice))
    actions = pipeline.action_space
    return {
        module_id: (observation, actions[module_id])
        for module_id, observation in pipeline.observation_space.items()
    }


def _env_spaces(choice: RunnerChoice) -> dict[str, Spaces]:
    return {INPUT_ENV_SINGLE_SPACES: (choice.observation_space, choice.action_space)}


def _leaves(space: Space) -> Iterator[Space]:
    if isinstance(space, gymnasium.spaces.Dict):
        for part in space.values():
            yield from _leaves(part)
    elif isinstance(space, gymnasium.spaces.Tuple):
        for part in space:
            yield from _leaves(part)
    else:
        yield space
