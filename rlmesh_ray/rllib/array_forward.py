"""A module's forward pass, without what torch and RLlib do round it in each step.

RLlib switches every part of the module to evaluation and back, twice for each forward pass, and
torch looks for hooks at each part. With small networks that takes longer than the network.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.torch.encoder import TorchActorCriticEncoder, TorchMLPEncoder
from ray.rllib.core.models.torch.heads import TorchFreeLogStdMLPHead, TorchMLPHead
from ray.rllib.core.models.torch.primitives import TorchMLP
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import nn
from torch.nn.modules import module as torch_module

Layer = Callable[[torch.Tensor], torch.Tensor]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# They do the same in training and in evaluation, and change nothing.
_LAYERS = (
    nn.Linear,
    nn.LayerNorm,
    nn.Identity,
    nn.ELU,
    nn.GELU,
    nn.LeakyReLU,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
_HEADS = (TorchMLPHead, TorchFreeLogStdMLPHead)


class ArrayForward:
    """The forward pass of a module that nobody looks at between two steps.

    It leaves the module in evaluation mode; whoever has called it last calls ``module.train()``
    if it was in training mode before, as RLlib does each time.

    Args:
        module: A TorchRLModule; what it consists of stays the same.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._layers = _layers_of(module)
        self._is_switched_as_usual = _is_switched_as_usual(module)

    def explore(self, batch: dict[str, Any], t: int) -> dict[str, Any]:
        """Do what ``module.forward_exploration`` does."""
        if self._layers is not None:
            return _straight(self._layers, batch)
        forward = self._module.forward_exploration
        if self._is_switched_as_usual:
            self._evaluate()
            forward = self._module._forward_exploration
        output: dict[str, Any] = forward(batch, t=t)
        return output

    def infer(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Do what ``module.forward_inference`` does."""
        if self._layers is not None:
            return _straight(self._layers, batch)
        forward = self._module.forward_inference
        if self._is_switched_as_usual:
            self._evaluate()
            forward = self._module._forward_inference
        output: dict[str, Any] = forward(batch)
        return output

    def _evaluate(self) -> None:
        # A forward pass may have switched a part of the module, for its dropout perhaps.
        if not _is_evaluating(self._module):
            self._module.eval()


def _is_switched_as_usual(module: Any) -> bool:
    """Tell whether nothing but its mode is changed round the module's forward pass."""
    return _has_rllibs(module, TorchRLModule, "forward_exploration", "forward_inference") and all(
        _has_rllibs(part, nn.Module, "train", "eval") for part in module.modules()
    )


def _has_rllibs(module: Any, kind: type[Any], *names: str) -> bool:
    """Tell whether a module has not got methods of its own in place of those of ``kind``."""
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
    """Return what an RLlib default module's actor does, one after the other; None: not known.

    That is the module of PPO, IMPALA and APPO, with dense layers and without hooks. Its critic,
    if it is there at all, changes nothing about the actions.
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
    parts = [*encoder.modules(), *module.pi.modules()]
    if not all(map(_is_plain, parts)):
        return None
    is_net_only = type(module.pi) is TorchMLPHead and not module.pi.clip_log_std
    head = list(_of_network(module.pi.net)) if is_net_only else [module.pi.forward]
    return [*_of_network(actor.net), *head]


def _is_plain(part: nn.Module) -> bool:
    """Tell whether to call a part is to call its class's ``forward``, with known code."""
    # Where torch keeps them under other names, nobody knows whether there are any.
    is_hooked = any(
        getattr(part, name, True) or getattr(torch_module, f"_global{name}", True)
        for name in _HOOKS
    )
    is_known = type(part) in (
        *_LAYERS,
        *_HEADS,
        nn.Sequential,
        TorchActorCriticEncoder,
        TorchMLP,
        TorchMLPEncoder,
    )
    return is_known and not is_hooked and not _has_own_call(part)


def _has_own_call(part: nn.Module) -> bool:
    own = vars(part)
    return "forward" in own or "_forward" in own or own.get("_compiled_call_impl") is not None


def _of_network(network: Any) -> Iterator[Layer]:
    return (layer.forward for layer in network.mlp)
