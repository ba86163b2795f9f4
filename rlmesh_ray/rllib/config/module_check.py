"""Check that RLlib's default modules accept the spaces of an environment."""

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import torch
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.utils.spaces.space_utils import (
    get_base_struct_from_space,
    get_dummy_batch_for_space,
)
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from rlmesh_ray.compat.rllib import MODULE_SETTINGS, connector_of, module_spec_of
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib.config.config_checks import RunnerChoice, is_tune_param
from rlmesh_ray.spaces.contract import EnvContract

Space = gymnasium.Space[Any]
Spaces = tuple[Space, Space]
"""Of observations and of actions."""
Misfit = tuple[Exception | str, str]
"""RLlib's error, or the reason as a text, and what to do about it."""

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
    for owner, spaces, (reason, remedy) in _misfits(config, choice):
        observation, action = map(_short, spaces)
        cause = reason if isinstance(reason, Exception) else None
        if cause is not None:  # its first line
            reason = str(cause).splitlines()[0].rstrip(".") if str(cause) else type(cause).__name__
        raise ConfigurationError(
            f"RLlib's default module for {config.algo_class.__name__} does not fit "
            f"{contract.id}{owner and f' ({owner})'}, with observations {observation} and actions "
            f"{action}: {reason}; {remedy}"
        ) from cause


def _short(space: Space) -> str:
    text = str(space)
    return text if len(text) <= 120 else f"{text[:117]}..."


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


def _misfits(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[tuple[str, Spaces, Misfit]]:
    """Yield the agent or policy that has the spaces (empty: there is one agent), and the spaces."""
    whole = choice.observation_space, choice.action_space
    by_agent: dict[str, Any] = {"": whole}
    if choice.is_multi_agent:
        observations, actions = map(get_base_struct_from_space, whole)
        by_agent = {f"agent {agent!r}": (observations[agent], actions[agent]) for agent in actions}
    for owner, spaces in by_agent.items():
        for misfit in _misfits_of_actions(config, spaces[1]):
            yield owner, spaces, misfit
    if connector_of(config, "env_to_module") is not None:
        return
    try:
        by_module = _by_module(config, choice)
        specs = config.get_multi_rl_module_spec(spaces=by_module, inference_only=True)
    except Exception as error:  # noqa: BLE001  # RLlib would raise the same error later
        yield "", whole, (error, "see to it in multi_agent(policies=..., policy_mapping_fn=...)")
        return
    for module_id, spec in specs.rl_module_specs.items():
        owner = f"policy {module_id!r}" if choice.is_multi_agent else ""
        for misfit in _misfits_of_module(spec):
            yield owner, (spec.observation_space, spec.action_space), misfit


def _misfits_of_actions(config: AlgorithmConfig, actions: Space) -> Iterator[Misfit]:
    if isinstance(config, DQNConfig) and not isinstance(actions, gymnasium.spaces.Discrete):
        remedy = f"wrap the environment, or, before configure, set {_OWN_MODULE}"
        yield "it takes Discrete actions only", remedy
    for leaf in _leaves(actions):
        if isinstance(leaf, gymnasium.spaces.Discrete) and leaf.start:
            first, count = int(leaf.start), int(leaf.n)
            reason = (
                f"it numbers actions from 0, not from {first}, and would send 0 to "
                f"{count - 1} where the environment takes {first} to {first + count - 1}"
            )
            remedy = f"{_FROM_ZERO}, or, before configure, set {_OWN_ACTIONS} or {_OWN_MODULE}"
            yield reason, remedy
        if isinstance(leaf, gymnasium.spaces.Text):
            yield "RLlib has no actions of Text", "wrap the environment so that it takes numbers"


def _misfits_of_module(spec: RLModuleSpec) -> Iterator[Misfit]:
    observation: Space = spec.observation_space
    is_image = isinstance(observation, gymnasium.spaces.Box) and len(observation.shape) == 3
    remedy = _FILTERS if is_image else _remedy(observation)
    try:
        # This check must not change the random numbers of the user's program.
        with torch.random.fork_rng(devices=[]):
            module: RLModule = spec.build()
        is_pixels = is_image and observation.dtype == np.uint8
        remedy = _FLOATS_OF_PIXELS if is_pixels else _AS_FLOATS
        if not module.is_stateful():
            zeros = get_dummy_batch_for_space(observation, fill_value=0, batch_size=1)
            with torch.inference_mode():
                module.forward_inference(convert_to_torch_tensor({Columns.OBS: zeros}))
    except Exception as error:  # noqa: BLE001  # RLlib would raise the same error later
        yield error, remedy


def _remedy(observation: Space) -> str:
    parts = _leaves(observation)
    if any(isinstance(part, gymnasium.spaces.Text) for part in parts):
        return (
            "RLlib has no encoder for Text: wrap the environment so that it gives numbers, or, "
            f"before configure, set {_OWN_OBSERVATIONS} to a connector that makes numbers of it"
        )
    if any(isinstance(part, gymnasium.spaces.Discrete) and part.start for part in parts):
        return (
            f"{_FROM_ZERO}, as RLlib's FlattenObservations takes them, or, before configure, set "
            f"{_OWN_OBSERVATIONS} to a connector that takes the start away"
        )
    return (
        f"wrap the environment, or, before configure, set {_OWN_MODULE} or {_OWN_OBSERVATIONS}, "
        "such as RLlib's FlattenObservations"
    )


def _by_module(config: AlgorithmConfig, choice: RunnerChoice) -> dict[str, Spaces]:
    """Return the spaces of each module, without custom connectors."""
    spaces = choice.observation_space, choice.action_space
    if not choice.is_multi_agent:
        return {DEFAULT_MODULE_ID: spaces}
    pipeline = config.build_env_to_module_connector(spaces={INPUT_ENV_SINGLE_SPACES: spaces})
    actions = pipeline.action_space
    return {
        module_id: (observation, actions[module_id])
        for module_id, observation in pipeline.observation_space.items()
    }


def _leaves(space: Space) -> list[Space]:
    found: list[Space] = tree.flatten(get_base_struct_from_space(space))
    return found
