"""A torch module compiled for nested tensors: what it takes, and when torch has to be asked."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rlmesh_ray.errors import ConfigurationError
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


class Applied(torch.nn.Module):
    """Calls a function on what a layer makes of the input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.function = function

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.function(self.layer(rows))


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: torch.nn.functional.max_pool1d(rows[:, None], 2)[:, 0],
        lambda rows: torch.nn.functional.adaptive_max_pool1d(rows[:, None], 1)[:, 0],
        lambda rows: rows.amax(1),
        lambda rows: rows.min(1).values,
        lambda rows: rows.topk(2).values,
        lambda rows: rows.argmax(1),
        torch.sign,
        torch.relu,
        lambda rows: rows.clamp(-1, 1),
        lambda rows: rows.softmax(1),
    ],
    ids=[
        "max_pool",
        "adaptive_pool",
        "amax",
        "min",
        "topk",
        "argmax",
        "sign",
        "relu",
        "clamp",
        "softmax",
    ],
)
def test_nan_comes_out_as_in_torch(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = Applied(function).requires_grad_(False)
    rows = torch.linspace(-2, 2, 8).reshape(2, 4)
    compiled = CompiledTorchModule(module, rows)
    assert compiled.run(rows) is not None

    def same(batch: torch.Tensor) -> bool:
        found = compiled.run(batch)
        return found is None or np.allclose(found, module(batch), atol=1e-5, equal_nan=True)

    for number in (torch.nan, torch.inf, -torch.inf):
        broken = rows.clone()
        broken[0, 2] = number
        assert same(broken)
    module.layer.bias[3] = torch.nan
    assert same(rows)


class Looked(torch.nn.Module):
    """Looks up rows by what a function makes of the input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3).requires_grad_(False)
        self.function = function

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table(self.function(rows))
        return found


@pytest.mark.parametrize(
    "module",
    [
        Looked(lambda rows: rows[:, 0]),
        Looked(lambda rows: rows[:, 0].float().long()),
        Looked(lambda rows: rows.unbind(1)[1]),
        Looked(lambda rows: torch.stack([rows[:, 1], rows[:, 0]])[1]),
        Applied(lambda rows: rows.gather(1, rows.argmax(1)[:, None])),
    ],
    ids=["integers", "floats", "unbound", "stacked", "gathered"],
)
def test_an_index_below_zero_is_left_to_torch_which_refuses_it(module: torch.nn.Module) -> None:
    rows = torch.tensor([[0, 2], [4, 1]])
    if isinstance(module, Applied):
        rows = torch.rand(2, 4, generator=torch.Generator().manual_seed(1))
    compiled = CompiledTorchModule(module.requires_grad_(False), rows)

    found = compiled.run(rows)
    assert found is not None
    assert torch.allclose(found, module(rows), atol=1e-6)
    assert (compiled.run(-rows) is None) == isinstance(module, Looked)


def test_indices_that_a_module_computes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="looks up rows by numbers that it computes"):
        CompiledTorchModule(Looked(lambda rows: rows[:, 0] - 1), torch.tensor([[1, 2], [4, 1]]))
    table = torch.nn.Embedding(5, 1).requires_grad_(False)
    table.weight.copy_(torch.arange(5.0)[:, None] - 1)
    with pytest.raises(ConfigurationError, match="looks up rows by numbers that it computes"):
        CompiledTorchModule(
            torch.nn.Sequential(table, Looked(lambda rows: rows[:, 0].long())),
            torch.tensor([1, 2]),
        )


class OneHot(torch.nn.Module):
    """Marks places by an index, beside signed numbers."""

    def forward(self, observations: Any) -> torch.Tensor:
        marks = torch.nn.functional.one_hot(observations["index"], 5)
        return torch.cat([marks.float(), observations["speed"]], 1)


def test_signed_numbers_beside_an_index_are_none() -> None:
    index, speed = torch.tensor([0, 4]), torch.tensor([[-1.0], [2.0]])
    compiled = CompiledTorchModule(OneHot(), {"index": index, "speed": speed})

    assert compiled.run({"index": index, "speed": speed}) is not None
    assert compiled.run({"index": index - 1, "speed": speed}) is None


def test_slices_of_signed_numbers_are_no_lookup() -> None:
    module = Applied(lambda rows: rows[:, 1:3] + rows[:, [0, 2]]).requires_grad_(False)
    rows = torch.linspace(-2, 2, 8).reshape(2, 4)

    assert CompiledTorchModule(module, rows).run(rows) is not None
