"""Layers that are called one after the other, against the networks that they are of."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from rlmesh_ray.models.fast_path.sequential import is_sequential, layers_in
from rlmesh_ray.models.torch.module import TorchModule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.ELU()))
    return nn.Sequential(nn.Linear(3, 8), inner, nn.Linear(8, 2))


def test_the_layers_of_a_network_give_what_it_gives_to_the_last_bit() -> None:
    values = torch.randn(33, 3, generator=torch.Generator().manual_seed(1))
    expected = network()(values)

    for layer in layers_in(network()):
        values = layer(values)

    assert is_sequential(network())
    assert torch.equal(values, expected)


class Doubled(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(values)


def _with_a_part_missing() -> nn.Module:
    rest = network()
    rest.add_module("later", None)
    return rest


def _with_own_forward() -> nn.Module:
    odd = network()
    odd[0].forward = lambda values: values.sum(-1, keepdim=True).expand(-1, 8)
    return odd


def _with_hook(register: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        hooked = network()
        getattr(hooked.get_submodule("1.2.0"), register)(lambda *_: None)
        return hooked

    return make


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5)),
        lambda: nn.Sequential(Doubled(3, 8)),
        _with_a_part_missing,
        _with_own_forward,
        _with_hook("register_forward_pre_hook"),
        _with_hook("register_forward_hook"),
        _with_hook("register_full_backward_hook"),
    ],
    ids=[
        "random",
        "own class",
        "a part missing",
        "own forward",
        "pre-hook",
        "hook",
        "backward hook",
    ],
)
def test_what_is_more_than_its_layers_is_called_itself(make: Callable[[], nn.Module]) -> None:
    assert not is_sequential(make())


@pytest.mark.parametrize("is_later", [False, True])
def test_a_served_network_with_hooks_is_called_itself(is_later: bool) -> None:
    hooked, seen = network(), []
    served = TorchModule(hooked) if is_later else None
    hooked[1].register_forward_hook(lambda *_: seen.append(1))
    values = torch.zeros(2, 3)

    assert torch.equal((served or TorchModule(hooked)).run(values), network()(values))
    assert seen == [1]


def test_a_served_network_acts_with_its_new_weights() -> None:
    served = TorchModule(network(), inference="torch")
    values = torch.ones(2, 3)
    before = served.run(values)

    served.set_weights({name: 2 * array for name, array in served.get_weights().items()})

    twice = network()
    twice.load_state_dict({name: 2 * value for name, value in twice.state_dict().items()})
    assert torch.equal(served.run(values), twice(values))
    assert not torch.equal(served.run(values), before)


def test_a_weight_that_is_computed_later_on_is_computed() -> None:
    odd, values = network(), torch.ones(2, 3)
    served = TorchModule(odd, inference="torch")
    before = served.run(values)

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    parametrize.register_parametrization(odd[0], "weight", Halved())

    assert torch.equal(served.run(values), odd(values))
    assert not torch.equal(served.run(values), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_served_network_acts_with_its_own_weights(
    copied: Callable[[TorchModule], TorchModule],
) -> None:
    served, values = TorchModule(network(), inference="torch"), torch.ones(2, 3)
    twin = copied(served)
    twin.set_weights({name: 0 * array for name, array in twin.get_weights().items()})

    assert not twin.run(values).any()
    assert torch.equal(served.run(values), network()(values))


def test_a_hook_on_all_modules_is_called_though_it_came_later() -> None:
    served, seen = TorchModule(network(), inference="torch"), []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        served.run(torch.ones(2, 3))
    finally:
        handle.remove()

    assert seen
