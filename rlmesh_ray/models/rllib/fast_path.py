"""RLlib's default connectors on whole arrays, for served policies and for runners."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors import env_to_module as to_module
from ray.rllib.connectors import module_to_env as to_env
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical, TorchDiagGaussian
from ray.rllib.core.models.torch.encoder import TorchActorCriticEncoder, TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead
from ray.rllib.core.models.torch.primitives import TorchMLP
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unsquash_action,
)
from ray.rllib.utils.torch_utils import convert_to_torch_tensor
from torch import nn

from rlmesh_ray.models.torch.module import (
    Layer,
    hooks_on,
    is_sequential,
    layers_in,
    parts_of,
)
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
        explore: Whether to sample actions instead of taking the likeliest.
    """

    def __init__(
        self,
        env_to_module: Any,
        module_to_env: Any,
        module: Any,
        action_space: Any,
        *,
        explore: bool,
    ) -> None:
        self.to_module = partial(batch_of, device=env_to_module.connectors[-1]._device)
        """Returns the forward pass's input for observations, whose memory it may share."""
        get_actions = module_to_env.connectors[0]._get_actions
        self.add_actions = ActionSampler(module, get_actions, explore=explore).add_to
        """Adds actions to the module's output; see ``ActionSampler.add_to``."""
        fitting = module_to_env.connectors[_FITTING]
        self._action_struct = get_base_struct_from_space(action_space)
        # RLlib looks for a Box in each batch, and leaves all other actions as they are.
        self._is_never_fitted = not isinstance(
            from_gymnasium(action_space), (BoxSpec, DictSpec, TupleSpec)
        )
        self._fit: Any = None
        if fitting.normalize_actions:
            self._fit = unsquash_action
        elif fitting.clip_actions:
            self._fit = clip_action

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


# --- the forward pass without the overhead of torch and RLlib -------------------------------------

# RLlib switches every part of the module to evaluation mode and back, twice for each forward pass,
# and torch checks each part for hooks. With small networks that takes longer than the network.

_TENSORS_AS_THEY_ARE = (np.dtype(np.float32), np.dtype(np.uint8))
_HEADS = (TorchMLPHead, TorchFreeLogStdMLPHead)


def batch_of(observations: Any, device: Any) -> dict[str, Any]:
    """Return a forward pass's input, as RLlib's NumpyToTensor makes it.

    Args:
        observations: A batch; the tensor may share the memory of an array.
        device: The connector's device; None: the CPU.
    """
    if (
        type(observations) is np.ndarray
        and observations.dtype in _TENSORS_AS_THEY_ARE
        and observations.flags.writeable
        and _is_cpu(device)
    ):
        return {Columns.OBS: torch.from_numpy(observations)}
    batch: dict[str, Any] = convert_to_torch_tensor({Columns.OBS: observations}, device=device)
    return batch


@lru_cache(maxsize=16)
def _is_cpu(device: Any) -> bool:
    return device is None or torch.device(device).type == "cpu"


class FastForward:
    """The forward pass of a module whose training mode does not matter between two passes.

    It leaves the module in evaluation mode. After the last pass the caller calls ``module.train()``
    if the module was in training mode before, as RLlib does after each pass.

    Args:
        module: A TorchRLModule; its parts must not be replaced.
        explore: Whether it explores.
    """

    def __init__(self, module: Any, *, explore: bool) -> None:
        self._module, self._explore = module, explore
        self._layers = _layers_of(module)
        if self._layers is not None:
            self._hooks = hooks_on(module.encoder, module.pi)
        self._is_switched_as_usual = is_switched_as_usual(module)
        self._forward: Callable[..., dict[str, Any]]
        if self._is_switched_as_usual:
            self._forward = module._forward_exploration if explore else module._forward_inference
        else:
            self._forward = module.forward_exploration if explore else module.forward_inference

    def __call__(self, batch: dict[str, Any], **time: int) -> dict[str, Any]:
        """Return the module's outputs; ``t``, the environment steps so far, is for exploring."""
        if self._layers is not None and not any(self._hooks):
            return _straight(self._layers, batch)
        # A forward pass may have switched a part of the module, perhaps for its dropout.
        if self._is_switched_as_usual and not _is_evaluating(self._module):
            self._module.eval()
        return self._forward(batch, **time)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(FastForward, explore=self._explore), (self._module,)


def is_switched_as_usual(module: Any) -> bool:
    """Return whether RLlib changes nothing but the module's mode around a forward pass."""
    return _has_rllibs(module, TorchRLModule, "forward_exploration", "forward_inference") and all(
        _has_rllibs(part, nn.Module, "train", "eval") for part in parts_of(module)
    )


def _has_rllibs(module: Any, kind: type[Any], *names: str) -> bool:
    return all(
        getattr(type(module), name) is getattr(kind, name) and name not in vars(module)
        for name in names
    )


def _is_evaluating(module: nn.Module) -> bool:
    return not module.training and all(
        _is_evaluating(part) for part in module._modules.values() if part is not None
    )


# --- RLlib's default networks of dense layers ----------------------------------------------


def _straight(layers: Sequence[Layer], batch: dict[str, Any]) -> dict[str, Any]:
    values = batch[Columns.OBS]
    with torch.no_grad():
        for layer in layers:
            values = layer(values)
    return {Columns.ACTION_DIST_INPUTS: values}


def _layers_of(module: Any) -> list[Layer] | None:
    """Return the layers of an RLlib default module's actor; None: it is another module.

    The default module is that of PPO, IMPALA and APPO, with dense layers and without hooks. Its
    critic, if there is one, has no influence on the actions.
    """
    if not (
        _has_rllibs(module, TorchRLModule, "forward_exploration", "forward_inference")
        and _has_rllibs(module, TorchRLModule, "_forward_exploration", "_forward_inference")
        and _has_rllibs(module, DefaultPPOTorchRLModule, "_forward")
        and type(module.encoder) is TorchActorCriticEncoder
        and type(module.pi) in _HEADS
    ):
        return None
    encoder = module.encoder
    actor = encoder.encoder if encoder.config.shared else encoder.actor_encoder
    if type(actor) is not TorchMLPEncoder:
        return None
    if type(actor.net) is not TorchMLP or type(module.pi.net) is not TorchMLP:
        return None  # the network was replaced
    known = (*_HEADS, TorchActorCriticEncoder, TorchMLP, TorchMLPEncoder)
    if not is_sequential(encoder, *known) or not is_sequential(module.pi, *known):
        return None
    is_net_only = type(module.pi) is TorchMLPHead and not module.pi.clip_log_std
    head = layers_in(module.pi.net.mlp) if is_net_only else [module.pi.forward]
    return [*layers_in(actor.net.mlp), *head]


# --- sampling of actions, with the results of RLlib's GetActions ----------------------------------

# RLlib's distributions, and torch's below them, cost more than drawing the numbers. For the two
# that RLlib's default modules use, the same operations are done here on the same tensors in the
# same order: so the results are the same, and so is the generator's state. Other distributions are
# left to RLlib.

SampledActions = torch.Tensor | NDArray[Any]
Draw = Callable[[torch.Tensor], tuple[SampledActions, SampledActions]]
"""From a distribution's inputs, one row for each lane, to actions and their log probabilities."""

_LOG_SQRT_TAU = math.log(math.sqrt(2 * math.pi))
_ALSO_NUMPYS = (torch.float32, torch.float64)
_OF_ROWS = (torch.Tensor, np.ndarray)
_NARROWED = {
    np.dtype(np.float16): np.dtype(np.float32),
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
}


class ActionSampler:
    """Adds actions to a module's output.

    Args:
        module: A TorchRLModule.
        get_actions: The method of RLlib's connector, for other distributions.
        explore: Whether to draw actions instead of taking the likeliest.
    """

    def __init__(
        self,
        module: Any,
        get_actions: Callable[[dict[str, Any], Any, bool], None],
        *,
        explore: bool,
    ) -> None:
        self._module, self._explore = module, explore
        self._get_actions = get_actions
        self._draws = _DRAWS if explore else _LIKELIEST
        self._kind = (
            module.get_exploration_action_dist_cls
            if explore
            else module.get_inference_action_dist_cls
        )
        # Overridden methods are called by RLlib, as often as RLlib does.
        self._has_usual_kinds = _has_rllibs(
            module,
            TorchRLModule,
            "get_exploration_action_dist_cls",
            "get_inference_action_dist_cls",
        )

    def add_to(self, output: dict[str, Any]) -> None:
        """Add actions, and their log probabilities, unless the module's output has them."""
        inputs = output.get(Columns.ACTION_DIST_INPUTS)
        is_known = (
            self._has_usual_kinds
            and type(inputs) is torch.Tensor
            and inputs.dim() == 2
            and Columns.ACTIONS not in output
            and Columns.ACTION_LOGP not in output
        )
        draw = self._draws.get(self._kind()) if is_known else None
        if draw is None:
            self._get_actions(output, self._module, self._explore)
            return
        output[Columns.ACTIONS], output[Columns.ACTION_LOGP] = draw(
            output[Columns.ACTION_DIST_INPUTS].detach()
        )


def _categorical(logits: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    if logits.is_cpu and logits.dtype in _ALSO_NUMPYS:
        normalized = _normalized(logits)
        chosen = _drawn(torch.softmax(normalized, dim=-1))
        logp = normalized.numpy()[np.arange(len(chosen)), chosen]
        # Else there were other numbers than finite ones and -inf: torch handles them below.
        if math.isfinite(logp.dot(logp)):
            return chosen, logp
    normalized = logits - logits.logsumexp(dim=-1, keepdim=True)
    actions = torch.multinomial(torch.softmax(normalized, dim=-1), 1, True)
    return actions.squeeze(-1), normalized.gather(-1, actions).squeeze(-1)


def _normalized(logits: torch.Tensor) -> torch.Tensor:
    """Subtract the logarithm of the sum of exponentials; NaN where a row's largest is infinite.

    ``torch.logsumexp`` does the same after a check for infinite numbers, which takes as long for so
    few numbers.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    total = (logits - largest).exp_().sum(dim=-1, keepdim=True)
    return logits - total.log_().add_(largest)


def _drawn(probabilities: torch.Tensor) -> NDArray[np.int64]:
    """Draw an index for each row as torch.multinomial does, without its check of each number.

    NumPy does the operations with results that are the same to the last bit: for so few numbers in
    half the time.
    """
    times = torch.empty_like(probabilities).exponential_(1).numpy()
    indices: NDArray[np.int64] = np.divide(probabilities.numpy(), times, out=times).argmax(axis=1)
    return indices


def _diagonal_gaussian(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw as RLlib's TorchDiagGaussian, which is torch's Normal, summed over the last axis."""
    mean, log_deviation = inputs.chunk(2, dim=-1)
    deviation = log_deviation.exp()
    actions = torch.normal(mean, deviation)
    logp = -((actions - mean) ** 2) / (2 * deviation**2) - deviation.log() - _LOG_SQRT_TAU
    return actions, logp.sum(-1)


_DRAWS: dict[type[Any], Draw] = {
    TorchCategorical: _categorical,
    TorchDiagGaussian: _diagonal_gaussian,
}


def _likeliest_choice(logits: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    """Choose as RLlib's TorchDeterministic of the largest logit, whose log probability is zero."""
    actions = logits.argmax(dim=-1)
    return actions, torch.zeros_like(actions)


def _mean(inputs: torch.Tensor) -> tuple[SampledActions, SampledActions]:
    """Choose as RLlib's TorchDeterministic of a Gaussian's mean; the zeros have its shape."""
    mean, log_deviation = inputs.chunk(2, dim=-1)
    if mean.shape != log_deviation.shape:
        _ = mean + log_deviation  # raises if they do not fit, as RLlib's distribution does
    return mean, torch.zeros_like(mean)


_LIKELIEST: dict[type[Any], Draw] = {
    TorchCategorical: _likeliest_choice,
    TorchDiagGaussian: _mean,
}


def as_arrays(output: dict[str, Any]) -> dict[str, Any]:
    """Return a module's output as RLlib's TensorToNumpy does, with floats and integers of 32 bits.

    Arrays own their memory: a compiled module may write to the same tensors again.
    """
    if any(type(value) not in _OF_ROWS or not value.ndim for value in output.values()):
        arrays: dict[str, Any] = convert_to_numpy(output)
        return arrays
    return {
        name: narrowed(value if type(value) is np.ndarray else value.detach().cpu().numpy())
        for name, value in output.items()
    }


def narrowed(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy, of 32 bits where RLlib stores such."""
    return array.astype(_NARROWED.get(array.dtype, array.dtype))
