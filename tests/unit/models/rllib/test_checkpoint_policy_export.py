"""RLlib checkpoints as ONNX files: the actions are those of RLlib's connectors and module."""

import copy
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import onnxruntime
import pytest
import ray
import torch
from ray import cloudpickle
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPO, PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES

from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.models.onnx.policy_export import export_policy
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.spec import DiscreteSpec

spaces = gymnasium.spaces
VECTOR = spaces.Box(-1, 1, (4,))
PICTURE = spaces.Box(0, 1, (42, 42, 3))
CHOICE: gymnasium.Space[Any] = spaces.Discrete(3)
TORQUE = spaces.Box(-2, 1, (2,))
TINY = {"fcnet_hiddens": [8], "head_fcnet_hiddens": []}


def built(config: Any, observation: Any, action: Any, model: dict[str, Any]) -> Any:
    config = copy.deepcopy(config).rl_module(model_config=model)
    config.environment(observation_space=observation, action_space=action)
    torch.manual_seed(3)
    of_module = {"default_policy": (observation, action)}
    return config.get_rl_module_spec(spaces=of_module, inference_only=True).build()


CASES: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "PPO, discrete": (PPOConfig(), VECTOR, CHOICE, TINY),
    "PPO, several choices": (PPOConfig(), VECTOR, spaces.MultiDiscrete([3, 2, 4]), TINY),
    "PPO, of 64 bits": (
        PPOConfig(),
        spaces.Box(-np.inf, np.inf, (4,), np.float64),
        spaces.Box(-1, 3, (2,), np.float64),
        TINY,
    ),
    "PPO, unbounded": (PPOConfig(), VECTOR, spaces.Box(-np.inf, np.inf, (2,)), TINY),
    "PPO, a number": (PPOConfig(), VECTOR, spaces.Box(-2, 1, ()), TINY),
    "PPO, nested": (
        PPOConfig(),
        VECTOR,
        spaces.Dict(a=spaces.Box(-2, 1, (), np.float64), b=CHOICE),
        TINY,
    ),
    "APPO": (APPOConfig(), VECTOR, CHOICE, TINY),
    "IMPALA": (IMPALAConfig(), VECTOR, CHOICE, TINY),
    "DQN": (DQNConfig(), VECTOR, CHOICE, TINY),
    "SAC": (SACConfig(), VECTOR, TORQUE, TINY),
}


NAN_ACTIONS = {"PPO, several choices": [-1, -1, -1], "PPO, discrete": 3}
"""Outside of the spaces."""


@pytest.mark.parametrize("name", CASES)
def test_the_file_acts_as_the_module_between_rllibs_default_connectors(
    tmp_path: Path, name: str
) -> None:
    built(*CASES[name]).save_to_path(str(tmp_path / "module"))

    proof = export_policy(str(tmp_path / "module"), tmp_path / "policy.onnx")

    assert (proof.num_observations, proof.num_ties) == (1000, 0)
    is_box = isinstance(CASES[name][2], (spaces.Box, spaces.Dict))
    assert (proof.largest_difference is not None) == is_box
    if name in NAN_ACTIONS:
        session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
        (actions,) = session.run(None, {"observation": np.full((1, 4), np.nan, np.float32)})
        assert actions[0].tolist() == NAN_ACTIONS[name]


def test_a_network_of_pixels_acts_alike(tmp_path: Path) -> None:
    filters = {"conv_filters": [[4, 8, 4], [4, 6, 4]], **TINY}
    built(PPOConfig(), PICTURE, CHOICE, filters).save_to_path(str(tmp_path / "module"))

    assert export_policy(str(tmp_path / "module"), tmp_path / "p.onnx").num_ties == 0


def checkpoint(
    folder: Path, observation: Any, action: Any, pieces: Any, *, clip: bool = False
) -> tuple[Path, Any]:
    """Write a checkpoint as an Algorithm does, with own connectors, without starting Ray.

    Returns:
        The folder, and the pipeline from the environment to the module.
    """
    config = PPOConfig().env_runners(env_to_module_connector=lambda *_, **__: pieces)
    if clip:
        config.normalize_actions, config.clip_actions = False, True
    of_env = {INPUT_ENV_SINGLE_SPACES: (observation, action)}
    pipeline = config.build_env_to_module_connector(spaces=of_env, device="cpu")
    module = built(PPOConfig(), pipeline.observation_space, action, TINY)
    modules = folder / "learner_group" / "learner" / "rl_module"
    module.save_to_path(str(modules / "default_policy"))
    to_env = config.build_module_to_env_connector(spaces=of_env)
    for each, place in ((pipeline, "env_to_module"), (to_env, "module_to_env")):
        each.save_to_path(str(folder / f"{place}_connector"), state=each.get_state())
    (folder / "rllib_checkpoint.json").write_text(json.dumps({"ray_version": ray.__version__}))
    arguments: Any = (({"episode_lookback_horizon": 1},), {})
    (folder / "class_and_ctor_args.pkl").write_bytes(
        cloudpickle.dumps({"class": PPO, "ctor_args_and_kwargs": arguments})
    )
    return folder, pipeline


NESTED = spaces.Dict(
    {
        "z": spaces.Discrete(3),
        "a": spaces.Tuple([spaces.Box(-1, 1, (2, 2)), spaces.MultiDiscrete([2, 3])]),
        "m": spaces.MultiBinary(3),
        "f": spaces.Box(-1, 1, (), np.float64),
    }
)


# The nested space has parts of all kinds; alone they run at night.
@pytest.mark.parametrize(
    "observation",
    [
        NESTED,
        pytest.param(spaces.Discrete(5), marks=pytest.mark.nightly),
        pytest.param(PICTURE, marks=pytest.mark.nightly),
    ],
)
def test_flattened_observations_are_flattened_as_rllib_does(
    tmp_path: Path, observation: Any
) -> None:
    folder, _ = checkpoint(tmp_path, observation, CHOICE, [FlattenObservations()])

    export_policy(str(folder), tmp_path / "policy.onnx")

    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    names = {each.name for each in session.get_inputs()}
    assert names == ({"z", "a.0", "a.1", "m", "f"} if observation is NESTED else {"observation"})


@pytest.mark.parametrize("dtype", [pytest.param(np.float32, marks=pytest.mark.nightly), np.float64])
def test_filtered_observations_and_clipped_actions(tmp_path: Path, dtype: Any) -> None:
    space = spaces.Box(-5, 5, (4,), dtype)
    mean_std = MeanStdFilter()
    pieces = [mean_std, FlattenObservations()]
    checkpoint(tmp_path / "first", space, TORQUE, pieces)
    random = np.random.default_rng(0)
    for _ in range(50):
        mean_std._filters[None](random.normal(2.0, 0.5, 4).astype(dtype))
    folder, _ = checkpoint(tmp_path / "second", space, TORQUE, pieces, clip=True)

    proof = export_policy(str(folder), tmp_path / "policy.onnx")

    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"))
    (actions,) = session.run(None, {"observation": np.full((1, 4), 4.0, dtype)})
    assert proof.largest_difference is not None
    assert (np.abs(actions) <= 2).all()


class Decided(TorchRLModule):
    """Chooses its actions itself."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 3)

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {Columns.ACTIONS: self.net(batch[Columns.OBS]).argmax(-1)}


def test_memories_own_choices_and_own_connectors_are_refused(tmp_path: Path) -> None:
    lstm = {"use_lstm": True, "lstm_cell_size": 4, "max_seq_len": 4, **TINY}
    built(PPOConfig(), VECTOR, CHOICE, lstm).save_to_path(str(tmp_path / "lstm"))
    spec = RLModuleSpec(module_class=Decided, observation_space=VECTOR, action_space=CHOICE)
    spec.build().save_to_path(str(tmp_path / "decided"))
    picture = spaces.Box(0, 1, (10, 10, 1))
    checkpoint(tmp_path / "stacked", picture, CHOICE, [FrameStackingEnvToModule(num_frames=2)])

    for name, reason in (
        ("lstm", "its module has a memory"),
        ("decided", "Decided chooses its actions itself"),
        ("stacked", r"its connectors \(FrameStacking\) are other ones than RLlib's"),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            export_policy(str(tmp_path / name), tmp_path / "policy.onnx")
    assert not (tmp_path / "policy.onnx").exists()


def test_an_environment_of_other_spaces_is_refused(tmp_path: Path) -> None:
    built(*CASES["PPO, discrete"]).save_to_path(str(tmp_path / "module"))
    other = EnvContract("Other-v0", DiscreteSpec(2), DiscreteSpec(3), 1, AutoresetMode.DISABLED)

    with pytest.raises(ContractMismatchError, match="Other-v0"):
        export_policy(str(tmp_path / "module"), tmp_path / "policy.onnx", contract=other)
