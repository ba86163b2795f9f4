from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from rlmesh_ray.models.loading import as_policy, load_policy
from rlmesh_ray.models.policy import Policy, PolicyTraits, Rows
from rlmesh_ray.models.wrappers import KeptChunks, MappedPolicy
from rlmesh_ray.server.model.batcher import Batcher, LatencyGate
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.observation_map import ObservationMap
from rlmesh_ray.spaces.spec import BoxSpec

BOX = BoxSpec((3,), "float32", np.zeros(3, "f4").tobytes(), np.ones(3, "f4").tobytes())
CONTRACT = EnvContract("Test-v0", BOX, BOX, 2, AutoresetMode.DISABLED)


def noted(took_s: float, count: int, latency_gate: LatencyGate | None = None) -> LatencyGate:
    latency_gate = latency_gate or LatencyGate(only_computes=True)
    for _ in range(count):
        latency_gate.note(took_s)
    return latency_gate


def test_a_policy_must_prove_that_it_is_quick() -> None:
    assert not noted(0.0001, 99).is_fast
    assert noted(0.0001, 100).is_fast


def test_a_policy_that_may_wait_for_something_never_counts_as_quick() -> None:
    assert not noted(0.0001, 1000, LatencyGate(only_computes=False)).is_fast


def test_one_batch_that_was_interrupted_changes_nothing() -> None:
    latency_gate = noted(0.0001, 100)
    latency_gate.note(0.02)

    assert latency_gate.is_fast


def test_a_policy_that_becomes_slow_is_no_longer_quick_and_may_become_quick_again() -> None:
    latency_gate = noted(0.0001, 100)

    assert not noted(0.004, 100, latency_gate).is_fast
    assert noted(0.0001, 100, latency_gate).is_fast


def test_one_batch_that_took_for_ever_counts_for_a_long_time() -> None:
    latency_gate = noted(0.0001, 100)
    latency_gate.note(0.2)

    assert not noted(0.0001, 999, latency_gate).is_fast
    assert noted(0.0001, 1, latency_gate).is_fast


class Noisy(torch.nn.Module):
    """Adds noise, which cannot be compiled."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + torch.rand_like(rows)


def inference_of(policy: Policy) -> tuple[str, str]:
    """Return how a served policy runs, and why in torch, once a client's route is open."""
    collector = Batcher(policy, 8)
    policy.check_contract(CONTRACT)
    statistics = collector.statistics()
    collector.thread.close()
    return statistics.inference, statistics.torch_reason


def test_a_compiled_policy_says_so() -> None:
    policy = as_policy(torch.nn.Linear(3, 3), inference="compiled")

    assert inference_of(policy) == ("compiled", "")


def test_a_policy_in_torch_says_why() -> None:
    inference, reason = inference_of(as_policy(Noisy(), inference="auto"))

    assert inference == "torch"
    assert "Noisy computes something else when it is compiled" in reason


def test_an_onnx_file_is_compiled(tmp_path: Path) -> None:
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["obs"], ["out"])],
        "policy",
        [onnx.helper.make_tensor_value_info("obs", kind, ["n", 3])],
        [onnx.helper.make_tensor_value_info("out", kind, ["n", 3])],
    )
    opset = onnx.helper.make_opsetid("", 17)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8)
    onnx.save(model, tmp_path / "policy.onnx")

    assert inference_of(load_policy(tmp_path / "policy.onnx")) == ("compiled", "")


def test_a_function_has_no_such_choice() -> None:
    assert inference_of(as_policy(lambda observations: observations)) == ("", "")


@pytest.mark.parametrize(
    "wrap",
    [KeptChunks, lambda policy: MappedPolicy(policy, ObservationMap(["observation=observation"]))],
)
def test_a_policy_behind_another_says_how_it_runs(wrap: Callable[[Policy], Any]) -> None:
    policy = wrap(as_policy(torch.nn.Linear(3, 3), inference="torch"))
    collector = Batcher(policy, 8)

    assert collector.statistics().torch_reason == 'inference="torch" says so'
    collector.thread.close()


def test_a_policy_without_a_reason_text_runs_in_torch_all_the_same() -> None:
    class Silent:
        traits = PolicyTraits(torch_reason=lambda: "")

        def check_contract(self, contract: EnvContract) -> None:
            pass

        def predict(self, contract: EnvContract, rows: Rows) -> object:
            raise NotImplementedError

        def forget(self, route_key: str, env_index: int | None) -> None:
            pass

    assert inference_of(Silent()) == ("torch", "")
