"""Policies that run compiled act as the same ones do in torch, on the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import Policy, RouteRows, Rows
from rlmesh_ray.models.torch.policy import RecurrentTorchPolicy, TorchPolicy
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import to_gymnasium
from rlmesh_ray.spaces.spec import BoxSpec

# Torch would rather have torch.export than TorchScript.
pytestmark = pytest.mark.filterwarnings(r"ignore:`torch\.jit\.:DeprecationWarning")
BOX = BoxSpec((3,), "float32", np.zeros(3, "f4").tobytes(), np.ones(3, "f4").tobytes())
CONTRACT = EnvContract("Test-v0", BOX, BOX, 16, AutoresetMode.DISABLED)
OBSERVATIONS = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
SIZES = (1, 2, 3, 11)
BUCKETS = pytest.mark.parametrize("buckets", [(), (2, 4)])


def mlp() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


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


class Noisy(torch.nn.Module):
    """Adds noise, which no two runs have in common."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def act(policy: Policy, num_rows: int) -> Any:
    slots = [PredictSlot(lane, "", 0, reset=False) for lane in range(num_rows)]
    return policy.predict(CONTRACT, Rows(OBSERVATIONS[:num_rows], [RouteRows("r", slots)]))


def assert_alike(policy: Policy, reference: Policy) -> None:
    for num_rows in SIZES:
        assert np.allclose(act(policy, num_rows), act(reference, num_rows), atol=1e-5)


@BUCKETS
def test_a_module_acts_alike_and_takes_new_weights(buckets: tuple[int, ...]) -> None:
    module, other = mlp(), mlp()
    policy = TorchPolicy(module, buckets=buckets, inference="compiled")
    policy.check_contract(CONTRACT)
    reference = TorchPolicy(other, inference="torch")

    policy.set_weights(other.state_dict())

    assert_alike(policy, reference)


@BUCKETS
def test_a_recurrent_module_acts_alike_and_keeps_its_states(buckets: tuple[int, ...]) -> None:
    module = Cell()
    policy = RecurrentTorchPolicy(module, buckets=buckets, inference="compiled")
    policy.check_contract(CONTRACT)

    reference = RecurrentTorchPolicy(module, inference="torch")

    for num_rows in (5, 2, 3, 5):
        assert np.allclose(act(policy, num_rows), act(reference, num_rows), atol=1e-5)


@pytest.mark.parametrize("save", ["script", "trace", "export"])
def test_a_file_of_torch_acts_alike(save: str, tmp_path: Path) -> None:
    module, file = mlp().eval(), tmp_path / "policy.pt"
    rows = torch.rand(2, 3)
    if save == "export":
        program = torch.export.export(module, (rows,), dynamic_shapes=({0: torch.export.Dim("n")},))
        torch.export.save(program, file)
    else:
        saved: Any = torch.jit.script(module) if save == "script" else torch.jit.trace(module, rows)
        torch.jit.save(saved, file)
    policy = load_policy(str(file), inference="compiled")

    policy.check_contract(CONTRACT)

    assert_alike(policy, TorchPolicy(module, inference="torch"))


LSTM = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}


@pytest.mark.parametrize(
    ("model", "buckets"),
    [
        ({}, ()),
        (LSTM, (2, 4)),
        pytest.param({}, (2, 4), marks=pytest.mark.nightly),
        pytest.param(LSTM, (), marks=pytest.mark.nightly),
    ],
)
def test_an_rlmodule_acts_alike_and_takes_new_weights(
    tmp_path: Path, model: dict[str, Any], buckets: tuple[int, ...]
) -> None:
    def saved(name: str) -> str:
        module = RLModuleSpec(
            module_class=DefaultPPOTorchRLModule,
            observation_space=to_gymnasium(BOX),
            action_space=to_gymnasium(BOX),
            model_config=DefaultModelConfig(fcnet_hiddens=[8], **model),
        ).build()
        module.save_to_path(str(tmp_path / name))
        return str(tmp_path / name)

    policy: Any = load_policy(saved("first"), buckets=buckets, inference="compiled")
    reference: Any = load_policy(saved("second"), inference="torch")
    act(policy, 2)
    policy.forget("r", None)

    policy.set_weights(reference.get_weights())

    assert_alike(policy, reference)


def test_a_module_that_cannot_be_compiled_is_refused_for_the_contract() -> None:
    policy = TorchPolicy(Noisy(), inference="compiled")

    with pytest.raises(ContractMismatchError, match=r"Noisy computes something .* or \"torch\""):
        policy.check_contract(CONTRACT)


def test_auto_serves_a_module_that_cannot_be_compiled() -> None:
    policy = TorchPolicy(Noisy())

    policy.check_contract(CONTRACT)

    assert act(policy, 3).shape == (3, 3)


@pytest.mark.parametrize(
    "make", [lambda: TorchPolicy(mlp(), inference="fast"), lambda: ModelServer(mlp(), inference="")]
)
def test_another_word_is_refused_with_the_known_ones(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="is not one of auto, torch, compiled"):
        make()


@pytest.mark.parametrize("inference", ["auto", "torch", "compiled"])
def test_a_server_answers_alike_however_it_runs_the_module(inference: str) -> None:
    module = mlp()
    with torch.no_grad():
        expected = module(torch.from_numpy(OBSERVATIONS)).numpy()

    with (
        ModelServer(module, inference=inference) as server,
        RemoteModel(server.address) as model,
    ):
        model.configure_route(CONTRACT)
        for _ in range(10):
            assert np.allclose(model.predict(OBSERVATIONS), expected, atol=1e-5)
        statistics = server.statistics()

    assert statistics.inference in (["compiled", "torch"] if inference == "auto" else [inference])
    assert bool(statistics.torch_reason) is (statistics.inference == "torch")
