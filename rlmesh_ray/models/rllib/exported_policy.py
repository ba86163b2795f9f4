"""An RLlib checkpoint as a function of tensors: connectors, module and greedy actions.

RLlib's default connectors are arithmetic on whole batches. So are FlattenObservations and
MeanStdFilter, which may stand before them; anything else is refused.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from ray.rllib.connectors.common.flatten_observations import FlattenObservations
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.columns import Columns
from ray.rllib.utils.numpy import SMALL_NUMBER
from ray.rllib.utils.torch_utils import convert_to_torch_tensor, flatten_inputs_to_1d_tensor

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.actions import value_outside
from rlmesh_ray.models.rllib.checkpoint import CheckpointParts
from rlmesh_ray.models.rllib.fast_path import (
    DEFAULT_ENV_TO_MODULE,
    DEFAULT_MODULE_TO_ENV,
    connector_types,
)
from rlmesh_ray.models.rllib.forward import forward_with_logits
from rlmesh_ray.models.torch.policy import GreedyForward, LeafAction, dtype_of
from rlmesh_ray.spaces.batch import Leaf, flatten, leaves, unflatten
from rlmesh_ray.spaces.contract import EnvContract
from rlmesh_ray.spaces.spec import BoxSpec, DiscreteSpec, MultiDiscreteSpec

Tensor = torch.Tensor
Connector = Callable[[Any], Any]
"""From a batch of observations, nested as the space is, to another."""


def greedy_forward(parts: CheckpointParts, contract: EnvContract) -> GreedyForward:
    """Return a checkpoint's policy as a function of tensors.

    Raises:
        ConfigurationError: It has a memory, or connectors that are not known here.
    """
    module = parts.module
    if module.is_stateful():
        raise ConfigurationError("its module has a memory, which an ONNX file cannot have")
    connectors = _connectors_of(parts)
    fitting = next(
        piece
        for piece in parts.module_to_env.connectors
        if isinstance(piece, NormalizeAndClipActions)
    )
    fits = [_fit_of(leaf, fitting) for leaf in leaves(contract.action_space)]

    def act(called: Any, *columns: Tensor) -> list[LeafAction]:
        observations = unflatten(contract.observation_space, columns)
        for connector in connectors:
            observations = connector(observations)
        # As RLlib's NumpyToTensor does.
        batch = convert_to_torch_tensor({Columns.OBS: observations})
        inputs, actions = _chosen(called, forward_with_logits(called, batch, explore=False))
        # A row with NaN must not become an action.
        is_nan = inputs.isnan().any(dim=-1)
        found = flatten(contract.action_space, actions)
        return [
            LeafAction(fit(action, is_nan), partial(_values, leaf, inputs))
            for leaf, fit, action in zip(leaves(contract.action_space), fits, found, strict=True)
        ]

    return GreedyForward(module, act)


def _chosen(module: Any, outputs: dict[str, Any]) -> tuple[Tensor, Any]:
    if Columns.ACTIONS in outputs:
        raise ConfigurationError(f"{type(module).__name__} chooses its actions itself")
    inputs = outputs[Columns.ACTION_DIST_INPUTS]
    distribution = module.get_inference_action_dist_cls().from_logits(inputs)
    return inputs, distribution.to_deterministic().sample()


def _values(leaf: Leaf, inputs: Tensor) -> Sequence[Tensor]:
    match leaf.spec:
        case DiscreteSpec(n=n) if not leaf.path and inputs.shape[-1] == n:
            return [inputs]
        case MultiDiscreteSpec(nvec=nvec) if not leaf.path and inputs.shape[-1] == sum(nvec):
            return torch.split(inputs, list(nvec), dim=-1)
    return []


# --- from the environment to the module ----------------------------------------------------


def _connectors_of(parts: CheckpointParts) -> list[Connector]:
    """Return the connectors before RLlib's default ones.

    Raises:
        ConfigurationError: There is one that is not known.
    """
    before = len(parts.env_to_module.connectors) - len(DEFAULT_ENV_TO_MODULE)
    own = parts.env_to_module.connectors[: max(before, 0)]
    unknown = {type(piece).__name__ for piece in own if type(piece) not in _KNOWN}
    is_default = (
        connector_types(parts.env_to_module)[max(before, 0) :] == DEFAULT_ENV_TO_MODULE
        and connector_types(parts.module_to_env) == DEFAULT_MODULE_TO_ENV
    )
    if unknown or not is_default:
        named = f" ({', '.join(sorted(unknown))})" if unknown else ""
        raise ConfigurationError(
            f"its connectors{named} are other ones than RLlib's default, FlattenObservations and "
            "MeanStdFilter, which a graph can express"
        )
    return [_KNOWN[type(piece)](piece) for piece in own]


def _flattening(piece: Any) -> Connector:
    if piece._multi_agent or piece._as_learner_connector:
        raise ConfigurationError("FlattenObservations is set up for several agents or a learner")

    def flattened(observations: Any) -> Tensor:
        kept = piece._remove_keys_from_dict(observations, None)
        rows: Tensor = flatten_inputs_to_1d_tensor(kept, piece._input_obs_base_struct)
        return rows

    return flattened


def _filtering(piece: Any) -> Connector:
    piece.get_state()  # makes the filters, if there are none yet
    filters = piece._filters
    if piece._multi_agent or not isinstance(filters[None].shape, np.ndarray):
        raise ConfigurationError("MeanStdFilter is set up for several agents or several arrays")
    kept = filters[None]
    mean, deviation = (
        torch.as_tensor(np.asarray(each, np.float64))
        for each in (kept.running_stats.mean, kept.running_stats.std + SMALL_NUMBER)
    )

    def filtered(observations: Tensor) -> Tensor:
        values = observations.double()
        if kept.demean:
            values = values - mean
        if kept.destd:
            values = values / deviation
        if kept.clip:
            values = values.clamp(-kept.clip, kept.clip)
        return values.to(observations.dtype)

    return filtered


_KNOWN: dict[type[Any], Callable[[Any], Connector]] = {
    FlattenObservations: _flattening,
    MeanStdFilter: _filtering,
}


# --- from the module to the environment ----------------------------------------------------


def _fit_of(leaf: Leaf, fitting: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what makes a module's actions those of the environment.

    It does what RLlib's NormalizeAndClipActions does, gives them the leaf's shape (see
    ``drop_unit_axis``), and takes actions out of the space in rows of NaN.

    Args:
        leaf: A leaf of the action space.
        fitting: The connector.
    """
    fitted = _fitted_to(leaf.spec, fitting) if isinstance(leaf.spec, BoxSpec) else None
    outside = value_outside(leaf)
    mark = None if outside is None else np.array(outside).astype(leaf.dtype).item()

    def fit(action: Tensor, is_nan: Tensor) -> Tensor:
        action = (fitted(action) if fitted else action).to(dtype_of(leaf))
        if isinstance(leaf.spec, BoxSpec) and not leaf.shape and action.dim() == 2:
            action = action.squeeze(-1)
        if mark is None:
            return action
        return action.masked_fill(is_nan.view(-1, *[1] * (action.dim() - 1)), mark)

    return fit


def _fitted_to(spec: BoxSpec, fitting: Any) -> Callable[[Tensor], Tensor] | None:
    bounds = [np.array(bound, spec.dtype) for bound in spec.bounds()]
    low, high = map(torch.from_numpy, bounds)

    def clipped(action: Tensor) -> Tensor:
        return torch.minimum(torch.maximum(action, low), high)

    if not fitting.normalize_actions:
        return clipped if fitting.clip_actions else None
    if np.isinf(bounds).any():
        return None
    if not low.is_floating_point():
        return lambda action: low + action
    return lambda action: clipped(low + (action + 1.0) * (high - low) / 2.0)
