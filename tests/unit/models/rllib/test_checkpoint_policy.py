"""RLModules that choose several actions at once, served from the folder that RLlib writes."""

import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule

from rlmesh_ray.errors import ConfigurationError, PolicyError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.models.policy import RouteRows, Rows, traits_of
from rlmesh_ray.protocol.messages import PredictSlot
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.odd_files import put

spaces = gymnasium.spaces
OBSERVATIONS = spaces.Box(-9.0, 9.0, (2,), np.float32)
TORQUE = spaces.Box(-2.0, 4.0, (1,), np.float32)
CHOICE: gymnasium.Space[Any] = spaces.Discrete(4)


class Chunks(TorchRLModule):
    """Chooses three actions at once: the first number of its observation, and halves of it."""

    horizon = 3

    def setup(self) -> None:
        """Have no parameters."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        first = batch[Columns.OBS][:, :1]
        return {Columns.ACTIONS: torch.stack([first, first / 2, first / 4], dim=1)}


class Choices(TorchRLModule):
    """Gives logits for three actions at once."""

    horizon = 3

    def setup(self) -> None:
        """Have no parameters."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        first = batch[Columns.OBS][:, 0].long()
        steps = (first[:, None] + torch.arange(3)) % 4
        return {Columns.ACTION_DIST_INPUTS: torch.nn.functional.one_hot(steps, 4).float()}


class Recurrent(Chunks):
    """Has a state."""

    def get_initial_state(self) -> dict[str, Any]:
        return {"h": torch.zeros(1)}

    def is_stateful(self) -> bool:
        return True


class Noisy(Choices):
    """Gives other logits each time."""

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: torch.rand(len(batch[Columns.OBS]), 3, 4)}


def saved(kind: type[TorchRLModule], action: gymnasium.Space[Any], folder: Path) -> str:
    module = kind(observation_space=OBSERVATIONS, action_space=action, model_config={})
    module.save_to_path(str(folder / "module"))
    return str(folder / "module")


def act(policy: Any, action: gymnasium.Space[Any], *first: float) -> Any:
    contract = EnvContract(
        "Test-v0",
        from_gymnasium(OBSERVATIONS),
        from_gymnasium(action),
        len(first),
        AutoresetMode.DISABLED,
    )
    policy.check_contract(contract)
    slots = [PredictSlot(lane, "", 0, False) for lane in range(len(first))]
    observations = np.array([[number, 0] for number in first], np.float32)
    return policy.predict(contract, Rows(observations, [RouteRows("r", slots)]))


def test_a_module_s_chunks_are_fitted_to_the_action_space(tmp_path: Path) -> None:
    policy: Any = load_policy(saved(Chunks, TORQUE, tmp_path))

    actions = act(policy, TORQUE, 1.0, -1.0)

    assert policy.traits.horizon == 3
    # RLlib spreads -1 to 1 over the space, and clips.
    assert np.asarray(actions)[..., 0].tolist() == [[4.0, 2.5, 1.75], [-2.0, -0.5, 0.25]]


@pytest.mark.parametrize("name", ["class_and_ctor_args.pkl", "module_state.pkl", "more"])
def test_a_pipe_among_the_files_of_a_checkpoint_is_named(name: str, tmp_path: Path) -> None:
    folder = saved(Chunks, TORQUE, tmp_path)
    put(os.mkfifo, Path(folder, name))

    with pytest.raises((ConfigurationError, PolicyError), match=rf"regular file.*{name}|not an RL"):
        load_policy(folder)


def test_a_module_s_chunks_of_numbers_lose_rllibs_axis(tmp_path: Path) -> None:
    number = spaces.Box(-2.0, 4.0, (), np.float32)

    actions = act(load_policy(saved(Chunks, number, tmp_path)), number, 1.0, -1.0)

    assert np.asarray(actions).tolist() == [[4.0, 2.5, 1.75], [-2.0, -0.5, 0.25]]


def test_of_a_module_s_logits_the_largest_wins_at_each_step(tmp_path: Path) -> None:
    policy: Any = load_policy(saved(Choices, CHOICE, tmp_path))

    actions = act(policy, CHOICE, 0, 3)

    assert np.asarray(actions).tolist() == [[0, 1, 2], [3, 0, 1]]


@pytest.mark.parametrize(
    ("inference", "reason"), [("compiled", None), ("torch", 'inference="torch" says so')]
)
def test_a_policy_says_why_it_runs_in_torch(
    inference: str, reason: str | None, tmp_path: Path
) -> None:
    policy = load_policy(saved(Chunks, TORQUE, tmp_path), inference=inference)
    act(policy, TORQUE, 1, 2)

    torch_reason = traits_of(policy).torch_reason

    assert torch_reason is not None
    assert torch_reason() == reason


def test_a_policy_that_has_to_be_compiled_and_cannot_be_is_refused_as_it_is_loaded(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigurationError, match=r'is impossible: Noisy .* or "torch"'):
        load_policy(saved(Noisy, CHOICE, tmp_path), inference="compiled")


def test_a_row_of_nan_is_an_error_of_its_batch(tmp_path: Path) -> None:
    policy: Any = load_policy(saved(Chunks, TORQUE, tmp_path))

    with pytest.raises(PolicyError, match="NaN in it for 1 of 2 rows"):
        act(policy, TORQUE, 1.0, np.nan)


def test_a_module_with_a_state_cannot_choose_several_actions_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="recurrent module"):
        load_policy(saved(Recurrent, TORQUE, tmp_path))


def test_the_module_s_word_and_the_operator_s_must_agree(tmp_path: Path) -> None:
    checkpoint = saved(Chunks, TORQUE, tmp_path)

    assert load_policy(checkpoint, horizon=3)
    with pytest.raises(ConfigurationError, match="the RLModule says 3 itself"):
        load_policy(checkpoint, horizon=2)
