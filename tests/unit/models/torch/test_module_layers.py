"""Layers that are called one after the other, against the networks that they are of."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.models.torch.module import is_sequential, layers_in
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec


def network() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Tanh(), nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 8), nn.ELU()))
    return nn.Sequential(nn.Linear(3, 8), inner, nn.Linear(8, 2))


def box(*shape: int) -> BoxSpec:
    return BoxSpec(
        shape, "float32", np.zeros(shape, "f4").tobytes(), np.ones(shape, "f4").tobytes()
    )


def run(served: TorchPolicy, values: torch.Tensor) -> torch.Tensor:
    """Return what a served network makes of two rows."""
    slots = [PredictSlot(lane, "", 0, False) for lane in range(len(values))]
    contract = EnvContract("Test-v0", box(3), box(2), len(values), AutoresetMode.DISABLED)
    rows = Rows(values.numpy(), [RouteRows("r", slots)])
    return torch.as_tensor(served.predict(contract, rows))


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
    served = TorchPolicy(hooked) if is_later else None
    hooked[1].register_forward_hook(lambda *_: seen.append(1))
    values = torch.zeros(2, 3)

    assert torch.equal(run(served or TorchPolicy(hooked), values), network()(values))
    assert seen == [1]


def test_a_served_network_acts_with_its_new_weights() -> None:
    served = TorchPolicy(network(), inference="torch")
    values = torch.ones(2, 3)
    before = run(served, values)

    served.set_weights({name: 2 * array for name, array in served.get_weights().items()})

    twice = network()
    twice.load_state_dict({name: 2 * value for name, value in twice.state_dict().items()})
    assert torch.equal(run(served, values), twice(values))
    assert not torch.equal(run(served, values), before)


def test_a_weight_that_is_computed_later_on_is_computed() -> None:
    odd, values = network(), torch.ones(2, 3)
    served = TorchPolicy(odd, inference="torch")
    before = run(served, values)

    class Halved(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    parametrize.register_parametrization(odd[0], "weight", Halved())

    assert torch.equal(run(served, values), odd(values))
    assert not torch.equal(run(served, values), before)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_of_a_served_network_acts_with_its_own_weights(
    copied: Callable[[TorchPolicy], TorchPolicy],
) -> None:
    served, values = TorchPolicy(network(), inference="torch"), torch.ones(2, 3)
    twin = copied(served)
    twin.set_weights({name: 0 * array for name, array in twin.get_weights().items()})

    assert not run(twin, values).any()
    assert torch.equal(run(served, values), network()(values))


def test_a_hook_on_all_modules_is_called_though_it_came_later() -> None:
    served, seen = TorchPolicy(network(), inference="torch"), []
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        run(served, torch.ones(2, 3))
    finally:
        handle.remove()

    assert seen
