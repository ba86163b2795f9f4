"""Calling the layers of a sequential network directly, one after the other.

torch checks each part of a network for hooks. With small networks that takes longer than some of
the layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

Layer = Callable[[torch.Tensor], torch.Tensor]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# The hooks for all modules of the process. Where torch has other names for them, it is unknown
# whether there are any: the dict is not empty then.
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}", {0: None}) for name in _HOOKS)
# Layers that do the same in training and in evaluation mode, and have no state.
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


class SequentialFastPath:
    """Calls the layers of a sequential network, or the network itself while it has hooks.

    Args:
        network: A network that ``is_sequential``; its parts must not be replaced.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._layers = tuple(layers_in(network))
        self._hooks = hooks_on(network)

    def __call__(self, *inputs: Any) -> Any:
        if len(inputs) != 1 or any(self._hooks):
            return self._network(*inputs)
        (values,) = inputs
        for layer in self._layers:
            values = layer(values)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return SequentialFastPath, (self._network,)


def layers_in(network: nn.Module) -> Iterator[Layer]:
    if isinstance(network, nn.Sequential):
        for part in network:
            yield from layers_in(part)
    elif isinstance(network, nn.Linear):
        yield _linear(network)
    elif isinstance(network, nn.Tanh):
        yield torch.tanh
    else:
        yield network.forward


def _linear(layer: nn.Linear) -> Layer:
    # torch looks up an attribute that is a parameter in three places, in Python.
    parameters, linear = layer._parameters, F.linear

    def call(values: torch.Tensor) -> torch.Tensor:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # it is computed from other parameters now
            return layer.forward(values)
        return linear(values, weight, bias)  # type: ignore[arg-type]  # a weight is never None

    return call


def hooks_on(*networks: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return the dicts of hooks that a pass through sequential networks would call.

    To be checked before each pass: a hook may be registered at any time.
    """
    own = (getattr(part, name) for one in networks for part in parts_of(one) for name in _HOOKS)
    return (*own, *_GLOBAL_HOOKS)


def parts_of(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the network and its parts, even if its class overrides ``modules``."""
    return nn.Module.modules(network)


def is_sequential(network: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Return whether calling the network only calls the ``forward`` of known classes in sequence.

    Args:
        network: The network.
        kinds: Known classes besides torch's own layers and Sequential.
    """
    known = (*_LAYERS, nn.Sequential, *kinds)
    return not any(_GLOBAL_HOOKS) and all(_is_plain(part, known) for part in parts_of(network))


def _is_plain(part: nn.Module, known: tuple[type[nn.Module], ...]) -> bool:
    is_hooked = any(getattr(part, name, True) for name in _HOOKS)
    is_whole = None not in part._modules.values()
    return type(part) in known and is_whole and not is_hooked and not _has_own_call(part)


def _has_own_call(part: nn.Module) -> bool:
    own = vars(part)
    return "forward" in own or "_forward" in own or own.get("_compiled_call_impl") is not None
