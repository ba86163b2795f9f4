"""The forward pass of an RLModule without the overhead of torch and RLlib.

RLlib switches every part of the module to evaluation mode and back, twice for each forward pass,
and torch checks each part for hooks. With small networks that takes longer than the network.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.torch.encoder import TorchActorCriticEncoder, TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead
from ray.rllib.core.models.torch.primitives import TorchMLP
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.torch_utils import convert_to_torch_tensor
from torch import nn

from rlmesh_ray.models.fast_path.sequential import (
    Layer,
    hooks_on,
    is_sequential,
    layers_in,
    parts_of,
)

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
        output: dict[str, Any] = self._forward(batch, **time)
        return output

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
