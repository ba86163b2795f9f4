"""A torch module compiled for nested tensors: what it takes, and when torch has to be asked."""

from typing import Any

import torch

from rlmesh_ray.models.torch.compiled_module import CompiledTorchModule
from rlmesh_ray.models.torch.module import TorchModule


class Arm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, observations: Any) -> torch.Tensor:
        found: torch.Tensor = self.layer(observations["arm"]) - 10 * observations.pop("base")
        return found


ARM, BASE = torch.linspace(-1, 1, 16).reshape(2, 2, 4)


def test_keys_in_another_order_are_left_to_torch() -> None:
    torch.manual_seed(1)
    module = Arm().eval()
    compiled = CompiledTorchModule(module, {"arm": ARM, "base": BASE})

    found: Any = compiled.run({"arm": ARM, "base": BASE})

    assert torch.allclose(found, module({"arm": ARM, "base": BASE}), atol=1e-5)
    assert compiled.run({"base": BASE, "arm": ARM}) is None


def test_hooks_and_changes_in_place_act_once_a_module_is_compiled() -> None:
    torch.manual_seed(2)
    layer = torch.nn.Linear(4, 2)
    module = TorchModule(layer, inference="compiled")
    module.try_out(ARM)
    before = module.run(ARM)

    with torch.no_grad():
        layer.bias.add_(1.0)
    assert torch.allclose(module.run(ARM), before + 1.0, atol=1e-5)

    layer.register_forward_hook(lambda _module, _inputs, output: output * 2)
    assert torch.allclose(module.run(ARM), 2 * (before + 1.0), atol=1e-5)
