"""The layers of a network, one after the other, where to call them is all that the network does.

torch looks for hooks at each part of a network. With small networks that takes longer than some of
the layers.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
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


def layers_in(network: nn.Module) -> Iterator[Layer]:
    """Yield what the layers of a plain network do, in order; see ``is_plain``."""
    if isinstance(network, nn.Sequential):
        for part in network:
            yield from layers_in(part)
    else:
        yield network.forward


def hooks_of(network: nn.Module) -> tuple[dict[int, Any], ...]:
    """Return where torch keeps the hooks of a plain network, and those of all modules.

    To be looked at before each pass: somebody may register one at any time.
    """
    own = [getattr(part, name) for part in network.modules() for name in _HOOKS]
    return (*own, *(getattr(torch_module, f"_global{name}") for name in _HOOKS))


def is_plain(network: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Tell whether to call each part is to call its class's ``forward``, with known code.

    Args:
        network: With all its parts.
        kinds: What else is known, beside torch's own layers and rows of them.
    """
    return all(_is_plain(part, (*_LAYERS, nn.Sequential, *kinds)) for part in network.modules())


def _is_plain(part: nn.Module, known: tuple[type[nn.Module], ...]) -> bool:
    # Where torch keeps them under other names, nobody knows whether there are any.
    is_hooked = any(
        getattr(part, name, True) or getattr(torch_module, f"_global{name}", True)
        for name in _HOOKS
    )
    return type(part) in known and not is_hooked and not _has_own_call(part)


def _has_own_call(part: nn.Module) -> bool:
    own = vars(part)
    return "forward" in own or "_forward" in own or own.get("_compiled_call_impl") is not None
