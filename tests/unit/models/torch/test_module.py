from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rlmesh_ray.models.loading import as_policy
from rlmesh_ray.models.policy import traits_of
from rlmesh_ray.models.torch.module import is_trusted, only_computes

CPU = torch.device("cpu")


class Own(nn.Module):
    """Might wait for anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Endless(Own):
    """Loops for as long as all outputs are positive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while bool((x > 0).all()):
            x = x + 0
        return self.layer(x)  # type: ignore[no-any-return]


class Python(Own):
    """Leaves TorchScript."""

    @torch.jit.ignore
    def wait(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        waited: torch.Tensor = self.wait(x)
        return waited


class Recurrent(nn.Module):
    """A script's states begin with a function, too."""

    @torch.jit.export
    def initial_state(self) -> torch.Tensor:
        state = torch.zeros(1)
        while bool((state > 1).all()):
            state = state + 0
        return state

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return state + x, state + x


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def traced() -> nn.Module:
    return torch.jit.trace(Own(), torch.zeros(1, 3))  # type: ignore[no-any-return]


def exported() -> nn.Module:
    return torch.export.export(Own(), (torch.zeros(1, 3),)).module()


def own_function(x: torch.Tensor) -> torch.Tensor:
    return x


def calling_own() -> nn.Module:
    graph = torch.fx.Graph()
    graph.output(graph.call_function(own_function, (graph.placeholder("x"),)))
    return torch.fx.GraphModule(nn.Module(), graph)


def hooked() -> nn.Module:
    module = network()
    module[1].register_forward_hook(lambda layer, given, returned: returned)
    return module


def hooked_before() -> nn.Module:
    module = network()
    module[1].register_forward_pre_hook(lambda layer, given: given)
    return module


def overridden() -> nn.Module:
    module: Any = nn.Linear(3, 2)
    module.forward = lambda x: x[:, :2]
    return nn.Sequential(module)


def with_own_activation() -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, activation=lambda x: x)


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        network,
        lambda: nn.LSTM(3, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, activation="gelu"),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: torch.jit.script(Own()),
        traced,
        exported,
    ],
)
def test_modules_of_torch_only_compute(make: Callable[[], nn.Module]) -> None:
    module = make()

    assert only_computes(module, CPU)
    assert not only_computes(module, torch.device("cuda"))
    assert traits_of(as_policy(module)).only_computes


@pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        Own,
        lambda: nn.Sequential(nn.Tanh(), Own()),
        lambda: torch.jit.script(Endless()),
        lambda: torch.jit.script(Python()),
        lambda: torch.jit.script(Recurrent()),
        calling_own,
        hooked,
        hooked_before,
        overridden,
        with_own_activation,
    ],
)
def test_modules_with_custom_code_may_wait(make: Callable[[], nn.Module]) -> None:
    module = make()

    assert not only_computes(module, CPU)
    assert not traits_of(as_policy(module)).only_computes


def test_names_that_begin_alike_are_not_known() -> None:
    strangers = type("Layer", (), {"__module__": "torchvision.ops"})

    assert is_trusted(nn.Linear)
    assert not is_trusted(strangers)
    assert not is_trusted(len)
