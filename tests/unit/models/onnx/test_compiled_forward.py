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
from rlmesh_ray.models.policy import RouteRows, Rows
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import BoxSpec


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
        return measured(module(torch.from_numpy(rows)).numpy(), outputs(forward, rows)[0])


def outputs(forward: CompiledForward, *inputs: Any) -> list[Any]:
    found = forward.arrays(*inputs)
    assert found is not None
    return found


def compiled(name: str) -> tuple[nn.Module, CompiledForward, tuple[int, ...]]:
    make, shape = CASES[name]
    torch.manual_seed(5)
    module = make().eval()
    return module, CompiledForward(module, torch.rand(2, *shape)), shape


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
            forward.run(torch.from_numpy(rows))
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
    forward = CompiledForward(module, example)
    module(example)  # it counts, which changes nothing else
    forward.load()

    change(module)

    for _ in range(2):
        with pytest.raises(ConfigurationError, match="Heated computes something else"):
            forward.load()


def test_a_module_that_draws_numbers_is_refused() -> None:
    def noisy(called: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = called(rows) + torch.randn(2)
        return found

    with pytest.raises(ConfigurationError, match=r"Sequential computes something else when it is"):
        CompiledForward(nn.Sequential(nn.Linear(4, 2)), torch.rand(2, 4), call=noisy)


class Floored(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows // 0.5


@pytest.mark.parametrize("module", [Floored(), nn.LogSigmoid()], ids=["floor", "log sigmoid"])
def test_what_is_computed_otherwise_for_negative_numbers_is_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match="computes something else when it is compiled"):
        CompiledForward(module, torch.zeros(2, 4))


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
    forward = CompiledForward(module, *examples)
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


# --- nested tensors, and when torch has to be asked ---------------------------------------


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
    compiled = CompiledForward(module, {"arm": ARM, "base": BASE})

    found: Any = compiled.run({"arm": ARM, "base": BASE})

    assert torch.allclose(found, module({"arm": ARM, "base": BASE}), atol=1e-5)
    assert compiled.run({"base": BASE, "arm": ARM}) is None


def box(*shape: int) -> BoxSpec:
    return BoxSpec(
        shape, "float32", np.zeros(shape, "f4").tobytes(), np.ones(shape, "f4").tobytes()
    )


def test_hooks_and_changes_in_place_act_once_a_module_is_compiled() -> None:
    torch.manual_seed(2)
    layer = torch.nn.Linear(4, 2)
    policy = TorchPolicy(layer, inference="compiled")
    contract = EnvContract("Test-v0", box(4), box(2), len(ARM), AutoresetMode.DISABLED)
    policy.check_contract(contract)
    slots = [PredictSlot(lane, "", 0, False) for lane in range(len(ARM))]
    rows = Rows(ARM.numpy(), [RouteRows("r", slots)])
    before = np.asarray(policy.predict(contract, rows))

    with torch.no_grad():
        layer.bias.add_(1.0)
    assert np.allclose(np.asarray(policy.predict(contract, rows)), before + 1.0, atol=1e-5)

    layer.register_forward_hook(lambda _module, _inputs, output: output * 2)
    assert np.allclose(np.asarray(policy.predict(contract, rows)), 2 * (before + 1.0), atol=1e-5)


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
    compiled = CompiledForward(module, rows)
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
    compiled = CompiledForward(module.requires_grad_(False), rows)

    found = compiled.run(rows)
    assert found is not None
    assert torch.allclose(found, module(rows), atol=1e-6)
    assert (compiled.run(-rows) is None) == isinstance(module, Looked)


def test_indices_that_a_module_computes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="looks up rows by numbers that it computes"):
        CompiledForward(Looked(lambda rows: rows[:, 0] - 1), torch.tensor([[1, 2], [4, 1]]))
    table = torch.nn.Embedding(5, 1).requires_grad_(False)
    table.weight.copy_(torch.arange(5.0)[:, None] - 1)
    with pytest.raises(ConfigurationError, match="looks up rows by numbers that it computes"):
        CompiledForward(
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
    compiled = CompiledForward(OneHot(), {"index": index, "speed": speed})

    assert compiled.run({"index": index, "speed": speed}) is not None
    assert compiled.run({"index": index - 1, "speed": speed}) is None


def test_slices_of_signed_numbers_are_no_lookup() -> None:
    module = Applied(lambda rows: rows[:, 1:3] + rows[:, [0, 2]]).requires_grad_(False)
    rows = torch.linspace(-2, 2, 8).reshape(2, 4)

    assert CompiledForward(module, rows).run(rows) is not None
