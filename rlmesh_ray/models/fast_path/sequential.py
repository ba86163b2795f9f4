"""The layers of a network, one after the other, where to call them is all that the network does.

torch looks for hooks at each part of a network. With small networks that takes longer than some of
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
# Those for all modules of the process. Where torch keeps them under other names, nobody knows
# whether there are any.
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}", {0: None}) for name in _HOOKS)
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


class SequentialFastPath:
    """Calls the layers of a plain network, or the network itself while somebody listens to it.

    Args:
        network: Plain, see ``is_sequential``; what it consists of stays the same.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._layers = tuple(layers_in(network))
        self._hooks = hooks_on(network)

    def __call__(self, *inputs: Any) -> Any:
        """Do what calling the network does."""
        if len(inputs) != 1 or any(self._hooks):
            return self._network(*inputs)
        (values,) = inputs
        for layer in self._layers:
            values = layer(values)
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        return SequentialFastPath, (self._network,)


def layers_in(network: nn.Module) -> Iterator[Layer]:
    """Yield what the layers of a plain network do, in order; see ``is_sequential``."""
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
    # torch looks an attribute that is a parameter up in three places, in Python.
    parameters, linear = layer._parameters, F.linear

    def call(values: torch.Tensor) -> torch.Tensor:
        try:
            weight, bias = parameters["weight"], parameters["bias"]
        except KeyError:  # somebody computes it from other parameters now
            return layer.forward(values)
        return linear(values, weight, bias)  # type: ignore[arg-type]  # a weight is never None

    return call


def hooks_on(*networks: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return where torch keeps the hooks that passes through plain networks would call.

    To be looked at before each pass: somebody may register one at any time.
    """
    own = (getattr(part, name) for one in networks for part in parts_of(one) for name in _HOOKS)
    return (*own, *_GLOBAL_HOOKS)


def parts_of(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the network and its parts, whatever its class has made of ``modules``."""
    return nn.Module.modules(network)


def is_sequential(network: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Tell whether to call each part is to call its class's ``forward``, with known code.

    Args:
        network: With all its parts.
        kinds: What else is known, beside torch's own layers and rows of them.
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
