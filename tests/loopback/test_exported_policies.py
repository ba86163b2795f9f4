"""``rlmesh-ray export``, and servers of what it has written."""

import json
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmesh_ray import ModelServer, RemoteModel
from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import RemoteModelError
from rlmesh_ray.models import load_policy

OWN = """
import torch

def module():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)

def function():
    return lambda observations: observations
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an operator's own code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_module", raising=False)
    monkeypatch.delenv("RLMESH_RAY_TOKEN", raising=False)
    Path("own_module.py").write_text(OWN)
    return tmp_path


def test_a_server_of_the_file_answers_as_one_of_the_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    envs = gymnasium.make_vec("Pendulum-v1", num_envs=4)
    RLModuleSpec(
        module_class=DefaultPPOTorchRLModule,
        observation_space=envs.single_observation_space,
        action_space=envs.single_action_space,
        model_config=DefaultModelConfig(fcnet_hiddens=[8]),
    ).build().save_to_path(str(folder / "checkpoint"))

    assert main(["export", "checkpoint", "policy.onnx", "--json"]) == 0

    (exported,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert exported["event"] == "exported"
    assert exported["num_observations"] == 1000
    assert exported["largest_difference"] < 1e-5
    observations, _ = envs.reset(seed=0)
    answers = []
    for name in ("checkpoint", "policy.onnx"):
        with ModelServer(load_policy(name)) as server, RemoteModel(server.address) as model:
            model.configure_route(envs)
            answers.append(model.predict(observations))
            with pytest.raises(RemoteModelError, match="CartPole-v1"):
                model.configure_route(gymnasium.make_vec("CartPole-v1", num_envs=4))
    assert answers[1].dtype == np.float32
    assert np.allclose(answers[0], answers[1], atol=1e-5)
    envs.close()


def test_a_module_is_exported_for_an_environment_and_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = ("--env", "CartPole-v1")

    assert main(["export", "own_module:module", "policy.onnx", *env]) == 0
    assert "1,000 observations: same actions\n" in capsys.readouterr().out
    assert main(["evaluate", *env, "--model", "policy.onnx", "--episodes", "2"]) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["own_module:module"], "for which spaces it is"),
        (["own_module:function", "--env", "CartPole-v1"], "a function is no module of torch"),
        (["own_module:module", "--env-kwargs", "{}"], "for --env with a Gymnasium id"),
    ],
)
def test_what_cannot_be_exported_is_wrong_usage(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(["export", arguments[0], "policy.onnx", *arguments[1:]]) == 2

    assert reason in capsys.readouterr().err
    assert not Path("policy.onnx").exists()
