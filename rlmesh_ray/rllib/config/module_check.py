"""Check that RLlib's default modules, and its connectors, accept the spaces of an environment."""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
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


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """A part of RLlib that does not accept the environment's spaces."""

    part: str
    """The part of RLlib."""
    owner: str
    """The agent or policy that has the spaces; empty where there is one agent."""
    spaces: Spaces
    reason: str
    remedy: str


def incompatibilities(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[Incompatibility]:
    """Yield the incompatibilities, for which RLlib would act wrongly or raise an unclear error.

    Custom modules and connectors are not checked: their requirements are unknown. Neither are
    settings of the module that Tune has yet to choose.
    """
    if choice.is_multi_agent and not config.is_multi_agent:
        return  # RLlib raises a clear error
    if _uses_default_module(config) and connector_of(config, "module_to_env") is None:
        yield from _wrong_actions(config, choice)
        if connector_of(config, "env_to_module") is None:
            yield from _refused_modules(config, choice)
    if connector_of(config, "env_to_module") is not None:
        yield from _refused_connectors(config, choice)


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


# --- actions that RLlib would choose outside their space ----------------------------------


def _wrong_actions(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[Incompatibility]:
    part = f"default module for {config.algo_class.__name__}"
    for owner, spaces in _by_agent(choice):
        if isinstance(config, DQNConfig) and not isinstance(spaces[1], gymnasium.spaces.Discrete):
            remedy = f"wrap the environment, or, before configure, set {_OWN_MODULE}"
            yield Incompatibility(part, owner, spaces, "it takes Discrete actions only", remedy)
        for leaf in _leaves(spaces[1]):
            if isinstance(leaf, gymnasium.spaces.Discrete) and leaf.start:
                first, count = int(leaf.start), int(leaf.n)
                reason = (
                    f"it numbers actions from 0, not from {first}, and would send 0 to "
                    f"{count - 1} where the environment takes {first} to {first + count - 1}"
                )
                remedy = f"{_FROM_ZERO}, or, before configure, set {_OWN_ACTIONS} or {_OWN_MODULE}"
                yield Incompatibility(part, owner, spaces, reason, remedy)
            if isinstance(leaf, gymnasium.spaces.Text):
                remedy = "wrap the environment so that it takes numbers"
                yield Incompatibility(part, owner, spaces, "RLlib has no actions of Text", remedy)


# --- observations that RLlib does not take ------------------------------------------------


def _refused_modules(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[Incompatibility]:
    """Make the modules for these spaces, as RLlib's runners will."""
    part = f"default module for {config.algo_class.__name__}"
    whole = (choice.observation_space, choice.action_space)
    try:
        by_module = _by_module(config, choice)
        specs = config.get_multi_rl_module_spec(spaces=by_module, inference_only=True)
    except Exception as error:  # noqa: BLE001  # RLlib would raise the same error later
        remedy = "see to it in multi_agent(policies=..., policy_mapping_fn=...)"
        yield Incompatibility(part, "", whole, _in_one_line(error), remedy)
        return
    for module_id, spec in specs.rl_module_specs.items():
        spaces = (spec.observation_space, spec.action_space)
        owner = f"policy {module_id!r}" if choice.is_multi_agent else ""
        try:
            # This check must not change the random numbers of the user's program.
            with torch.random.fork_rng(devices=[]):
                module = spec.build()
        except Exception as error:  # noqa: BLE001  # likewise
            yield Incompatibility(part, owner, spaces, _in_one_line(error), _remedy(spaces[0]))
            continue
        try:
            _show_zeros(module, spaces[0])
        except Exception as error:  # noqa: BLE001  # likewise
            yield Incompatibility(part, owner, spaces, _in_one_line(error), _as_floats(spaces[0]))


def _show_zeros(module: RLModule, observation: Space) -> None:
    """Run a module on an observation of zeros, if it needs no other input."""
    if module.is_stateful():
        return
    zeros = get_dummy_batch_for_space(observation, fill_value=0, batch_size=1)
    with torch.inference_mode():
        module.forward_inference(convert_to_torch_tensor({Columns.OBS: zeros}))


def _refused_connectors(config: AlgorithmConfig, choice: RunnerChoice) -> Iterator[Incompatibility]:
    """Yield a FlattenObservations that would raise at the runners' first observation."""
    whole = (choice.observation_space, choice.action_space)
    try:
        made = connector_of(config, "env_to_module")(None, _env_spaces(choice), None)
    except Exception:  # noqa: BLE001  # it needs an environment, which only runners have
        return
    pieces = made if isinstance(made, list | tuple) else [made]
    if not any(isinstance(piece, FlattenObservations) for piece in pieces):
        return
    part = "FlattenObservations"
    try:
        pipeline = EnvToModulePipeline(
            input_observation_space=whole[0],
            input_action_space=whole[1],
            connectors=list(pieces),
        )
    except Exception as error:  # noqa: BLE001  # custom connectors may raise any error
        if _is_raised_in(FlattenObservations, error):
            # It tries a random observation, so whether and where it raises is random.
            leaf = next(filter(_why_not, _leaves(whole[0])), whole[0])
            yield Incompatibility(
                part, "", whole, _why_not(leaf) or _in_one_line(error), _remedy(leaf)
            )
        return
    for piece in pipeline.connectors:
        for leaf in filter(_why_not, _flattened(piece)):
            yield Incompatibility(part, "", whole, _why_not(leaf), _remedy(leaf))


def _is_raised_in(kind: type[object], error: Exception) -> bool:
    return any(
        frame.f_globals.get("__name__") == kind.__module__
        for frame, _ in traceback.walk_tb(error.__traceback__)
    )


def _flattened(piece: ConnectorV2) -> Iterator[Space]:
    """Yield the leaves of the space that a connector flattens; none for other connectors."""
    if not isinstance(piece, FlattenObservations):
        return
    seen = [piece.input_observation_space]
    if piece._multi_agent:
        chosen = piece._agent_ids
        seen = [part for agent, part in seen[0].items() if not chosen or agent in chosen]
    for space in seen:
        is_dict = isinstance(space, gymnasium.spaces.Dict)
        for key, part in space.items() if is_dict else [(None, space)]:
            if key not in piece._keys_to_remove:
                yield from _leaves(part)


def _why_not(leaf: Space) -> str:
    """Return why a leaf cannot be flattened; empty: it can."""
    if isinstance(leaf, gymnasium.spaces.Text):
        return "it makes no numbers of Text"
    if not _is_index(leaf):
        return f"it makes one-hot vectors of indices, and {leaf} holds others"
    return ""


def _is_index(leaf: Space) -> bool:
    """Return whether RLlib makes distinct one-hot vectors of all values, negative ones included."""
    if not isinstance(leaf, gymnasium.spaces.Discrete):
        return True
    return -int(leaf.n) <= int(leaf.start) <= 0


def _as_floats(observation: Space) -> str:
    is_image = _is_image(observation) and observation.dtype == np.uint8
    return _FLOATS_OF_PIXELS if is_image else _AS_FLOATS


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


# --- spaces -------------------------------------------------------------------------------


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


def _in_one_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
