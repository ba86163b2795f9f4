"""A compiled forward pass computes what torch computes, also with weights that came later."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.compiled_forward import TOLERANCE, CompiledForward
from rlmesh_ray.models.onnx.compiled_forward import difference as measured
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph


def called(module: nn.Module, *inputs: torch.Tensor) -> tuple[Any]:
    return (module(*inputs),)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 4, 2), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(72, 3)
    )


def normalized() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(400, 2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 8, batch_first=True)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.cell(rows[:, None])[0][:, 0]
        return found


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (dense, (4,)),
    "convolutional": (convolutional, (3, 12, 12)),
    "BatchNorm": (normalized, (3, 12, 12)),
    "LSTM": (Recurrent, (4,)),
}


def difference(module: nn.Module, forward: CompiledForward, rows: Any) -> float:
    with torch.no_grad():
        return forward.difference([module(torch.from_numpy(rows)).numpy()], rows)


def outputs(forward: CompiledForward, *inputs: Any) -> list[Any]:
    found = forward(*inputs)
    assert found is not None
    return found


def compiled(name: str) -> tuple[nn.Module, CompiledForward, tuple[int, ...]]:
    make, shape = CASES[name]
    torch.manual_seed(5)
    module = make().eval()
    example = torch.rand(2, *shape)
    graph = OnnxGraph(module, called, {"obs": example}, ["out"])
    return module, CompiledForward(module, called, graph, example), shape


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_it_computes_what_torch_computes(name: str, num_rows: int) -> None:
    module, forward, shape = compiled(name)

    rows = np.random.default_rng(1).random((num_rows, *shape), np.float32)

    assert difference(module, forward, rows) <= TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_new_weights_act_at_once_in_place_and_after_load_otherwise(name: str) -> None:
    module, forward, shape = compiled(name)
    rows = np.random.default_rng(1).random((3, *shape), np.float32)
    before = outputs(forward, rows)[0]

    with torch.no_grad():
        for tensor in module.parameters():
            tensor.add_(0.1 * torch.rand_like(tensor))
    in_place = outputs(forward, rows)[0]
    assert not np.allclose(in_place, before, atol=1e-3)
    assert difference(module, forward, rows) <= TOLERANCE

    for parameter in module.parameters():
        parameter.data = parameter.data + 0.1  # which no tensor counts
    assert np.array_equal(outputs(forward, rows)[0], in_place)
    forward.load()

    assert not np.allclose(outputs(forward, rows)[0], in_place, atol=1e-3)
    assert difference(module, forward, rows) <= TOLERANCE


def test_weights_that_cannot_be_taken_are_an_error_until_they_can() -> None:
    module, forward, _ = compiled("dense")
    layer: Any = module[0]  # type: ignore[index]  # it is a Sequential
    with torch.no_grad():
        layer.weight.add_(1.0)
    layer.bias.data = torch.zeros(5)
    rows = np.zeros((2, 4), np.float32)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="new weights cannot be taken: ValueError"):
            forward(rows)
    layer.bias.data = torch.zeros(16)

    outputs(forward, rows)
    assert difference(module, forward, rows) <= TOLERANCE


class Heated(nn.Module):
    """Has values that are no weights."""

    masks: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.heat, self.shift = 1.0, torch.zeros(3)
        self.register_buffer("masks", torch.ones(3), persistent=False)
        self.num_calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        found: torch.Tensor = self.layer(rows) * self.masks / self.heat + self.shift
        return found


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "heat", 2.0),
        lambda module: setattr(module, "shift", torch.ones(3)),
        lambda module: module.shift.add_(1.0),
        lambda module: module.masks.zero_(),
    ],
    ids=["a number", "a tensor", "a tensor in place", "a buffer"],
)
def test_values_that_are_no_weights_may_not_change_what_is_computed(change: Any) -> None:
    torch.manual_seed(3)
    module, example = Heated().eval(), torch.rand(2, 4)
    graph = OnnxGraph(module, called, {"obs": example}, ["out"])
    forward = CompiledForward(module, called, graph, example)
    module(example)  # it counts, which changes nothing else
    forward.load()

    change(module)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="Heated computes something else"):
            forward.load()


def test_weights_that_the_runtime_rearranges_are_noticed() -> None:
    assert not compiled("dense")[1].is_rebuilt
    assert compiled("convolutional")[1].is_rebuilt


def test_a_module_that_draws_numbers_is_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    example = torch.rand(2, 4)

    def noisy(called: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor]:
        return (called(rows) + torch.randn(2),)

    graph = OnnxGraph(module, noisy, {"obs": example}, ["out"])

    with pytest.raises(ConfigurationError, match=r"Sequential computes something else when it is"):
        CompiledForward(module, noisy, graph, example)


class Floored(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows // 0.5


@pytest.mark.parametrize("module", [Floored(), nn.LogSigmoid()], ids=["floor", "log sigmoid"])
def test_what_is_computed_otherwise_for_negative_numbers_is_refused(module: nn.Module) -> None:
    example = torch.zeros(2, 4)
    graph = OnnxGraph(module, called, {"obs": example}, ["out"])

    with pytest.raises(ConfigurationError, match="computes something else when it is compiled"):
        CompiledForward(module, called, graph, example)


def test_numbers_that_are_none_are_equal_where_torch_has_them_too() -> None:
    module, forward, _ = compiled("dense")
    rows = np.zeros((2, 4), np.float32)
    rows[1, 2] = np.nan

    assert difference(module, forward, rows) <= TOLERANCE


class Masked(nn.Module):
    """Convolutions, and RLlib's usual mask over what they choose from."""

    def __init__(self) -> None:
        super().__init__()
        self.net = convolutional()

    def forward(self, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(rows)
        return logits + torch.log(mask).clamp(min=torch.finfo(torch.float32).min)


def single() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(400, 3))


MASK = torch.tensor([[1.0, 0.0, 1.0]]).repeat(2, 1)
SILENT: dict[str, tuple[Callable[[], nn.Module], list[torch.Tensor]]] = {
    "masked numbers": (Masked, [torch.linspace(0, 1, 864).reshape(2, 3, 12, 12), MASK]),
    "an example of zeros": (single, [torch.zeros(2, 4, 12, 12)]),
}


@pytest.mark.parametrize("name", SILENT)
def test_examples_that_hide_a_layer_hide_no_stale_weights(name: str) -> None:
    make, examples = SILENT[name]
    torch.manual_seed(7)
    module = make().eval()
    named = {f"input_{number}": each for number, each in enumerate(examples)}
    forward = CompiledForward(
        module, called, OnnxGraph(module, called, named, ["out"]), *named.values()
    )
    rows = [torch.rand_like(examples[0]), *examples[1:]]

    with torch.no_grad():
        expected = module(*rows).numpy()
    (found,) = outputs(forward, *(each.numpy() for each in rows))

    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)


MOST = float(np.finfo(np.float32).max)


@pytest.mark.parametrize(
    ("expected", "found", "is_same"),
    [
        ([1.0, -MOST], [500.0, -MOST], False),
        ([1.0, -MOST], [1.0, -MOST], True),
        ([1.0, -MOST], [1.0, MOST], False),
        ([1.0, -np.inf], [1.0, -np.inf], True),
        ([1.0, -np.inf], [1.0, -MOST], False),
        ([1.0, 2.0], [1.0, np.nan], False),
        ([1.0, 2.0], [1.0, np.inf], False),
        ([1000.0, 0.0], [1000.0, 1e-3], True),
        ([True, False], [True, True], False),
        ([True, False], [True, False], True),
    ],
)
def test_numbers_that_mask_others_are_no_measure_for_them(
    expected: list[Any], found: list[Any], is_same: bool
) -> None:
    dtype = bool if expected[0] is True else np.float32
    own, other = np.array(expected, dtype), np.array(found, dtype)

    assert (measured(own, other) <= TOLERANCE) is is_same
