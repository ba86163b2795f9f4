"""Compiled forward passes of RLModules, also of those with a state."""

import copy
from functools import partial
from typing import Any

import gymnasium
import pytest
import torch
import tree
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.onnx.compiled_forward import TOLERANCE, CompiledForward, difference
from rlmesh_ray.models.rllib.forward import bare_forward

VECTOR = gymnasium.spaces.Box(-1, 1, (4,))
CHOICE: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3)
TINY = {"fcnet_hiddens": [8], "head_fcnet_hiddens": []}
LSTM = {"use_lstm": True, "lstm_cell_size": 6, "max_seq_len": 4, **TINY}


def built(config: Any, model: dict[str, Any]) -> Any:
    config = copy.deepcopy(config).rl_module(model_config=model)
    config.environment(observation_space=VECTOR, action_space=CHOICE)
    torch.manual_seed(3)
    spaces = {"default_policy": (VECTOR, CHOICE)}
    return config.get_rl_module_spec(spaces=spaces, inference_only=True).build()


def batch_of(module: Any, num_rows: int, num_steps: int = 1) -> dict[str, Any]:
    """Observations and states of so many lanes."""
    states = module.get_initial_state()
    return {
        Columns.OBS: torch.rand(num_rows, num_steps, 4),
        Columns.STATE_IN: tree.map_structure(lambda s: torch.rand(num_rows, *s.shape), states),
    }


def apart(expected: Any, found: Any) -> float:
    """Return the largest difference of any two outputs."""
    pairs = zip(tree.flatten(expected), tree.flatten(found), strict=True)
    return max(difference(own.detach().numpy(), other.numpy()) for own, other in pairs)


def compiled_forward(module: Any, batch: dict[str, Any], *, explore: bool) -> CompiledForward:
    """Compile a module as runners do on RLlib's per-item path."""
    return CompiledForward(module, batch, call=partial(bare_forward, explore=explore))


@pytest.mark.parametrize("explore", [False, True])
def test_a_recurrent_module_computes_what_rllibs_forward_pass_does(explore: bool) -> None:
    module = built(PPOConfig(), LSTM).train()
    forward = compiled_forward(module, batch_of(module, 1), explore=explore)
    assert module.training

    for num_rows in (1, 2, 7):
        batch = batch_of(module, num_rows)
        expected = (
            module.forward_exploration(batch, t=0) if explore else module.forward_inference(batch)
        )
        found = forward.run(batch)
        assert found is not None
        assert apart(expected, found) <= TOLERANCE
        tree.assert_same_structure(found, expected)
        assert found[Columns.STATE_OUT]["actor"]["h"].shape == (num_rows, 1, 6)


def test_a_recurrent_module_takes_new_weights() -> None:
    module = built(PPOConfig(), LSTM)
    batch = batch_of(module, 3)
    forward = compiled_forward(module, batch, explore=False)

    for weight in module.parameters():
        weight.data = weight.data + torch.rand_like(weight)  # which no tensor counts
    assert apart(module.forward_inference(batch), forward.run(batch)) > TOLERANCE
    forward.load()

    assert apart(module.forward_inference(batch), forward.run(batch)) <= TOLERANCE


def test_batches_of_another_form_are_left_to_torch() -> None:
    module = built(PPOConfig(), LSTM)
    forward = compiled_forward(module, batch_of(module, 2), explore=False)
    batch = batch_of(module, 2)

    assert forward.run(batch) is not None
    assert forward.run(batch_of(module, 2, num_steps=3)) is None
    assert forward.run({**batch, "loss_mask": torch.ones(2, 1)}) is None
    assert forward.run({**batch, Columns.OBS: batch[Columns.OBS].double()}) is None


def test_what_cannot_be_compiled_is_refused_with_the_reason() -> None:
    dqn, lstm = built(DQNConfig(), TINY), built(PPOConfig(), LSTM)
    infos = {**batch_of(lstm, 2), Columns.INFOS: [{"lives": 3}, {}]}

    with pytest.raises(ConfigurationError, match="DQNTorchRLModule depends on the number of steps"):
        compiled_forward(dqn, {Columns.OBS: torch.rand(2, 4)}, explore=True)
    with pytest.raises(ConfigurationError, match="gets something else than tensors"):
        compiled_forward(lstm, infos, explore=True)
    with pytest.raises(ConfigurationError, match="is not on the CPU"):
        compiled_forward(lstm.to("meta"), batch_of(lstm, 2), explore=True)
