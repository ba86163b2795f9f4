"""Policies through torch.compile, against the same ones as they are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows
from rlmesh_ray.models.recurrent.policy import RecurrentTorchPolicy
from rlmesh_ray.models.torch.policy import TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of torch's compiler, about itself
]
BOX = BoxSpec((3,), "float32", np.zeros(3, "f4").tobytes(), np.ones(3, "f4").tobytes())
CONTRACT = EnvContract("Test-v0", BOX, BOX, 16, AutoresetMode.DISABLED)
OBSERVATIONS = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def graphs() -> Iterator[Any]:
    """Count what torch compiles."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield torch._dynamo.utils.counters["stats"]
    torch._dynamo.reset()


def act(policy: Policy, num_rows: int) -> Any:
    slots = [PredictSlot(lane, "", 0, reset=False) for lane in range(num_rows)]
    return policy.predict(CONTRACT, Rows(OBSERVATIONS[:num_rows], [RouteRows("r", slots)]))


def test_a_module_is_compiled_once_a_bucket_before_anyone_asks_and_takes_new_weights(
    graphs: Any,
) -> None:
    module, other = (
        torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        for _ in range(2)
    )
    policy = TorchPolicy(module, buckets=[2, 4], compile=True)

    policy.check_contract(CONTRACT)
    num_compiled = graphs["unique_graphs"]
    for weights in (module.state_dict(), other.state_dict()):
        policy.set_weights(weights)
        for num_rows in (1, 2, 3, 11):
            assert np.allclose(act(policy, num_rows), act(TorchPolicy(module), num_rows), atol=1e-6)

    assert num_compiled == 2
    assert graphs["unique_graphs"] == 2


class Cell(torch.nn.Module):
    """A GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(3, 3)

    def initial_state(self) -> Any:
        return {"hidden": torch.zeros(3)}

    def forward(self, x: torch.Tensor, state: Any) -> Any:
        hidden = self.cell(x, state["hidden"])
        return hidden, {"hidden": hidden}


def test_a_recurrent_module_is_compiled_once_a_bucket_and_keeps_state(graphs: Any) -> None:
    module = Cell()
    policy = RecurrentTorchPolicy(module, buckets=[2, 4], compile=True)
    as_it_is = RecurrentTorchPolicy(module)

    policy.check_contract(CONTRACT)
    for num_rows in (5, 2, 3, 5):
        assert np.allclose(act(policy, num_rows), act(as_it_is, num_rows), atol=1e-6)

    assert graphs["unique_graphs"] == 2


@pytest.mark.parametrize("model", [{}, {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}])
def test_an_rlmodule_is_compiled_once_a_bucket(
    graphs: Any, tmp_path: Path, model: dict[str, Any]
) -> None:
    module = RLModuleSpec(
        module_class=DefaultPPOTorchRLModule,
        observation_space=to_gymnasium(BOX),
        action_space=to_gymnasium(BOX),
        model_config=DefaultModelConfig(fcnet_hiddens=[8], **model),
    ).build()
    module.save_to_path(str(tmp_path))
    as_it_is = load_policy(str(tmp_path))
    policy = load_policy(str(tmp_path), buckets=[2, 4], compile=True)

    for num_rows in (3, 1, 2, 11):
        assert np.allclose(act(policy, num_rows), act(as_it_is, num_rows), atol=1e-6)

    assert graphs["unique_graphs"] > 0
    num_compiled = graphs["unique_graphs"]
    for num_rows in range(1, 10):
        act(policy, num_rows)
    assert graphs["unique_graphs"] == num_compiled
