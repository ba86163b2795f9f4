"""A compiled RLModule gives what RLlib's forward pass and its sampling of actions give."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.distribution.torch.torch_distribution import TorchCategorical
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.rllib.forward import CompiledModule

VECTOR = gymnasium.spaces.Box(-1, 1, (4,))
PICTURE = gymnasium.spaces.Box(0, 1, (42, 42, 3))
CHOICE: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3)
TORQUE = gymnasium.spaces.Box(-1, 1, (2,))

CASES = {
    "PPO, discrete": (PPOConfig(), VECTOR, CHOICE),
    "PPO, of pixels": (PPOConfig(), PICTURE, CHOICE),
    "PPO, continuous": (PPOConfig(), VECTOR, TORQUE),
    "IMPALA": (IMPALAConfig(), VECTOR, CHOICE),
    "DQN": (DQNConfig(), VECTOR, CHOICE),
    "SAC": (SACConfig(), VECTOR, TORQUE),
}


def built(config: Any, observation: Any, action: Any) -> Any:
    config = copy.deepcopy(config)
    config.environment(observation_space=observation, action_space=action)
    torch.manual_seed(3)
    spaces = {"default_policy": (observation, action)}
    return config.get_rl_module_spec(spaces=spaces, inference_only=True).build()


def rows_of(space: Any, num: int) -> Any:
    space.seed(4)
    return np.stack([space.sample() for _ in range(num)])


def compiled(module: Any, space: Any, *, explore: bool) -> CompiledModule:
    return CompiledModule(module, rows_of(space, 1), explore=explore, seed=7)


@pytest.mark.parametrize("name", CASES)
def test_without_exploring_the_actions_are_rllibs(name: str) -> None:
    config, observation, action = CASES[name]
    module = built(config, observation, action)
    rows = rows_of(observation, 9)

    output = compiled(module, observation, explore=False).run(rows, 0)
    expected = module.forward_inference({Columns.OBS: torch.from_numpy(rows)})
    if Columns.ACTIONS not in expected:
        kind = module.get_inference_action_dist_cls()
        greedy = kind.from_logits(expected[Columns.ACTION_DIST_INPUTS]).to_deterministic()
        expected[Columns.ACTIONS] = greedy.sample()
        expected[Columns.ACTION_LOGP] = greedy.logp(expected[Columns.ACTIONS])

    assert output is not None
    assert output.keys() == expected.keys()
    for key, values in expected.items():
        found = output[key]
        assert found.shape == tuple(values.shape), key
        assert found.dtype in (np.float32, np.int32), key
        assert np.allclose(found, values.detach().numpy(), atol=1e-4), key


@pytest.mark.parametrize("name", CASES)
def test_exploring_gives_the_columns_that_rllib_gives(name: str) -> None:
    config, observation, action = CASES[name]
    module = built(config, observation, action)
    rows = rows_of(observation, 9)

    output = compiled(module, observation, explore=True).run(rows, 0)
    expected = module.forward_exploration({Columns.OBS: torch.from_numpy(rows)}, t=0)

    assert output is not None
    assert output.keys() - {Columns.ACTIONS, Columns.ACTION_LOGP} == expected.keys() - {
        Columns.ACTIONS
    }
    assert len(output[Columns.ACTIONS]) == 9
    if Columns.ACTION_DIST_INPUTS in output:
        kind = module.get_exploration_action_dist_cls()
        drawn = torch.from_numpy(output[Columns.ACTIONS])
        logp = kind.from_logits(expected[Columns.ACTION_DIST_INPUTS]).logp(drawn)
        assert np.allclose(output[Columns.ACTION_LOGP], logp.detach().numpy(), atol=1e-3)


def test_dqn_explores_as_often_as_its_schedule_says() -> None:
    config = DQNConfig().training(epsilon=[[0, 1.0], [1000, 0.0]])
    module = built(config, VECTOR, CHOICE)
    forward = compiled(module, VECTOR, explore=True)
    rows = np.repeat(rows_of(VECTOR, 1), 3000, axis=0)

    def shares(t: int) -> Any:
        output = forward.run(rows, t)
        assert output is not None
        return np.bincount(output[Columns.ACTIONS], minlength=3) / 3000

    assert np.allclose(shares(0), 1 / 3, atol=0.05)
    assert shares(1000).max() == 1


def test_the_module_keeps_its_mode() -> None:
    module = built(*CASES["PPO, discrete"])
    module.train()

    compiled(module, VECTOR, explore=True)

    assert module.training


def test_outputs_from_which_no_action_can_be_drawn_are_left_to_torch() -> None:
    forward = compiled(built(*CASES["PPO, discrete"]), VECTOR, explore=True)

    assert forward.run(np.full((2, 4), np.nan, np.float32), 0) is None


class Actor(TorchRLModule):
    """A module of a user's own."""

    def setup(self) -> None:
        self.net = torch.nn.Linear(4, 3)

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {
            Columns.ACTION_DIST_INPUTS: self.net(batch[Columns.OBS]),
            Columns.EMBEDDINGS: batch[Columns.OBS].double() * 2,
        }


class Annealed(Actor):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        heat = 2.0 if kwargs.get("t", 0) > 10 else 1.0
        return {Columns.ACTION_DIST_INPUTS: heat * self.net(batch[Columns.OBS])}


class Decided(Actor):
    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        return {Columns.ACTIONS: self.net(batch[Columns.OBS]).argmax(-1)}


class Switched(Actor):
    def forward_exploration(self, batch: Any, **kwargs: Any) -> Any:
        return super().forward_exploration(batch, **kwargs)


def own(kind: type[TorchRLModule]) -> Any:
    return RLModuleSpec(module_class=kind, observation_space=VECTOR, action_space=CHOICE).build()


def test_a_users_module_is_compiled_with_all_its_outputs() -> None:
    rows = rows_of(VECTOR, 5)

    output = compiled(own(Actor), VECTOR, explore=True).run(rows, 0)

    assert output is not None
    assert np.allclose(output[Columns.EMBEDDINGS], rows * 2)
    assert output[Columns.EMBEDDINGS].dtype == np.float32  # as RLlib stores it


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Annealed, "depends on the number of steps"),
        (Decided, "Decided chooses its actions itself"),
        (Switched, "Switched has a forward_exploration"),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_the_reason(kind: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        compiled(own(kind), VECTOR, explore=True)


class Cautious(DefaultDQNTorchRLModule):
    """A DQN of a user's own, which never takes the last action."""

    def _forward_inference(self, batch: Any, **kwargs: Any) -> Any:
        values = self.compute_q_values(batch)["qf_preds"]
        return {Columns.ACTIONS: values[:, :-1].argmax(-1)}


class Heated(DefaultDQNTorchRLModule):
    def _forward_exploration(self, batch: Any, t: Any = 0, **kwargs: Any) -> Any:
        return {Columns.ACTIONS: self.compute_q_values(batch)["qf_preds"].softmax(-1).argmax(-1)}


@pytest.mark.parametrize(("kind", "explore"), [(Cautious, False), (Heated, True)])
def test_a_dqn_that_chooses_otherwise_is_refused(kind: Any, explore: bool) -> None:
    config = DQNConfig().rl_module(rl_module_spec=RLModuleSpec(module_class=kind))

    module = built(config, VECTOR, CHOICE)
    with pytest.raises(ConfigurationError, match=f"{kind.__name__} chooses its actions itself"):
        compiled(module, VECTOR, explore=explore)
    assert compiled(module, VECTOR, explore=not explore).run(rows_of(VECTOR, 2), 0) is not None


class Second(TorchCategorical):
    """Is greedy for the second best."""

    def to_deterministic(self) -> Any:
        raise NotImplementedError


class Picky(Actor):
    def get_exploration_action_dist_cls(self) -> Any:
        return TorchCategorical

    def get_inference_action_dist_cls(self) -> Any:
        return Second


def test_greedy_actions_are_those_of_the_distribution_for_inference() -> None:
    assert compiled(own(Picky), VECTOR, explore=True).run(rows_of(VECTOR, 2), 0) is not None
    with pytest.raises(ConfigurationError, match="actions of Second can be drawn by torch only"):
        compiled(own(Picky), VECTOR, explore=False)


def test_hooks_are_noticed_whenever_they_are_registered() -> None:
    module = own(Actor)
    forward = compiled(module, VECTOR, explore=True)
    forward.load()

    module.net.register_forward_hook(lambda *_: None)

    with pytest.raises(ConfigurationError, match="Actor has hooks"):
        forward.load()
