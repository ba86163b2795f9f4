"""A module as an ONNX graph: what it computes, and which of its numbers are weights."""

import contextlib
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.onnx_export import OnnxGraph
from rlmesh_ray.models.onnx.onnx_models import OnnxSession
from rlmesh_ray.models.torch.module import weight_tensors

ROWS = torch.linspace(-1, 1, 8).reshape(2, 4)


def called(module: nn.Module, *inputs: torch.Tensor) -> tuple[Any]:
    return (module(*inputs),)


def graph_of(module: nn.Module, rows: torch.Tensor = ROWS) -> OnnxGraph:
    return OnnxGraph(module.eval(), called, {"obs": rows}, ["out"])


def weights_of(module: nn.Module) -> dict[str, Any]:
    return {name: tensor.numpy() for name, tensor in weight_tensors(module).items()}


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows)
        return found if rows.mean() > 0 else -found


def test_weights_that_were_equal_when_the_graph_was_made_stay_two() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    module = nn.Sequential(first, nn.Tanh(), second)
    for layer in (first, second):
        nn.init.zeros_(layer.bias)
    graph = graph_of(module)

    nn.init.ones_(second.bias)
    (found,) = OnnxSession(graph.serialized(weights_of(module))).run(ROWS.numpy())

    assert set(graph.weight_names.values()) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert np.allclose(found, module(ROWS).detach().numpy(), atol=1e-6)


def test_a_weight_that_two_layers_share_is_one() -> None:
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    module = nn.Sequential(first, nn.Tanh(), second)
    graph = graph_of(module)

    nn.init.ones_(first.weight)
    (found,) = OnnxSession(graph.serialized(weights_of(module))).run(ROWS.numpy())

    assert np.allclose(found, module(ROWS).detach().numpy(), atol=1e-6)


def test_a_buffer_that_the_state_leaves_out_is_a_constant() -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    module.register_buffer("scale", torch.tensor(2.0), persistent=False)
    graph = OnnxGraph(module, lambda m, rows: (m(rows) * m.scale,), {"obs": ROWS}, ["out"])

    (found,) = OnnxSession(graph.serialized(weights_of(module))).run(ROWS.numpy())

    assert np.allclose(found, 2 * module(ROWS).detach().numpy(), atol=1e-6)


def test_the_module_itself_is_not_changed() -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    before = {name: array.copy() for name, array in weights_of(module).items()}

    graph_of(module)

    for name, array in weights_of(module).items():
        assert np.array_equal(array, before[name])


@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_the_number_of_rows_is_free(num_rows: int) -> None:
    module = nn.Sequential(nn.Linear(4, 2))
    session = OnnxSession(graph_of(module).serialized(weights_of(module)))

    (found,) = session.run(np.ones((num_rows, 4), np.float32))

    assert found.shape == (num_rows, 2)


def test_a_branch_on_values_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigurationError, match=r"depends on values .*test_onnx_export.py:\d+"):
        graph_of(Branching())


def test_a_branch_is_refused_in_a_folder_that_is_called_as_torch_is(tmp_path: Path) -> None:
    file = tmp_path / "ray" / "torch" / "net.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x): return x if x.sum() > 0 else -x\n"
    )
    code: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), code)

    with pytest.raises(ConfigurationError, match=r"depends on values .*net\.py:3"):
        graph_of(code["Net"]())


@pytest.mark.filterwarnings("ignore")
def test_a_branch_is_found_although_other_threads_change_how_warnings_are_shown() -> None:
    others = contextlib.ExitStack()
    others.enter_context(warnings.catch_warnings())  # before the export, and left in mid-export

    def disturbed(module: nn.Module, rows: torch.Tensor) -> tuple[Any]:
        others.close()
        return (module(rows),)

    with pytest.raises(ConfigurationError, match=r"depends on values .*test_onnx_export.py:\d+"):
        OnnxGraph(Branching().eval(), disturbed, {"obs": ROWS}, ["out"])


def test_one_module_is_exported_at_a_time() -> None:
    order: list[str] = []
    others: list[threading.Thread] = []

    def export(name: str) -> None:
        def noted(module: nn.Module, rows: torch.Tensor) -> tuple[Any]:
            if name == "first" and not others:
                others.append(threading.Thread(target=export, args=["second"]))
                others[0].start()
                others[0].join(0.1)  # it waits for this to end
            order.append(name)
            return (module(rows),)

        OnnxGraph(nn.Linear(4, 2), noted, {"obs": ROWS}, ["out"])

    export("first")
    others[0].join()

    assert order == sorted(order)
    assert set(order) == {"first", "second"}


def test_what_onnx_has_no_operation_for_is_refused_with_the_cause() -> None:
    with pytest.raises(ConfigurationError, match=r"Sequential cannot be written as ONNX: .*erfinv"):
        OnnxGraph(
            nn.Sequential(), lambda _, rows: (torch.special.erfinv(rows),), {"obs": ROWS}, ["out"]
        )
