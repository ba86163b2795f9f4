"""Forward passes without RLlib's and torch's bookkeeping, against the module's own."""

import copy
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import nn

from rlmesh_ray.models.rllib.fast_path import FastForward
from rlmesh_ray.testing.equality import assert_identical

VECTOR = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = gymnasium.spaces.Box(-1.0, 1.0, (42, 42, 1), np.float32)
DISCRETE: gymnasium.Space[Any] = gymnasium.spaces.Discrete(4)


def module(
    kind: Callable[[], AlgorithmConfig] = PPOConfig,
    *,
    observation: gymnasium.Space[Any] = VECTOR,
    action: gymnasium.Space[Any] = DISCRETE,
    inference_only: bool = True,
    of: type[TorchRLModule] | None = None,
    **settings: Any,
) -> Any:
    config = kind().rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[8, 8], **settings))
    spaces = {"default_policy": (observation, action)}
    spec = config.get_rl_module_spec(spaces=spaces, inference_only=inference_only)
    if of is not None:
        spec.module_class = of
    torch.manual_seed(0)
    return spec.build()


def batch_for(space: gymnasium.Space[Any]) -> dict[str, Any]:
    rows = np.random.default_rng(1).normal(size=(5, *(space.shape or ()))).astype(np.float32)
    return {Columns.OBS: torch.from_numpy(rows)}


def outputs(explore: Callable[..., Any], infer: Callable[..., Any], batch: Any) -> list[Any]:
    """Call alternately, as evaluation between training does."""
    torch.manual_seed(5)
    given = [explore(batch, t=7), infer(batch), explore(batch, t=8)]
    return [{key: value.numpy(force=True) for key, value in each.items()} for each in given]


def assert_same(one: Any, other: Any, observation: gymnasium.Space[Any] = VECTOR) -> FastForward:
    """Compare the methods of one module with the passes through its twin."""
    explore, infer = (FastForward(other, explore=explores) for explores in (True, False))
    batch = batch_for(observation)
    expected = outputs(one.forward_exploration, one.forward_inference, batch)

    actual = outputs(explore, infer, batch)

    assert_identical(actual, expected, "outputs")
    return infer


CONTINUOUS = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
DEFAULTS: dict[str, dict[str, Any]] = {
    "PPO": {},
    "IMPALA": {"kind": IMPALAConfig},
    "with a critic": {"inference_only": False},
    "with a shared encoder": {"vf_share_layers": True},
    "with other activations": {"fcnet_activation": "relu"},
    "with a head": {"head_fcnet_hiddens": [6], "head_fcnet_activation": "silu"},
    "continuous": {"action": CONTINUOUS},
    "continuous, clipped": {"action": CONTINUOUS, "log_std_clip_param": 0.01},
    "continuous, free deviations": {"action": CONTINUOUS, "free_log_std": True},
}


@pytest.mark.parametrize("settings", DEFAULTS.values(), ids=DEFAULTS.keys())
def test_a_network_of_dense_layers_gives_the_same_without_being_called(
    settings: dict[str, Any],
) -> None:
    other = module(**settings)

    assert_same(module(**settings), other)

    assert other.training, "its mode does not matter to it, and stays"


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": DQNConfig},
        {"observation": IMAGE, "conv_filters": [[4, 4, 4], [8, 11, 1]]},
    ],
)
def test_other_modules_of_rllibs_are_switched_once(settings: dict[str, Any]) -> None:
    other = module(**settings)

    assert_same(module(**settings), other, settings.get("observation", VECTOR))

    assert not other.training, "until the caller switches it back"


def test_a_hook_is_called() -> None:
    seen: list[Any] = []
    one, other = module(), module()
    other.pi.net.mlp[0].register_forward_hook(lambda *_: seen.append(1))

    assert_same(one, other)

    assert len(seen) == 3


class WithAnotherHead(DefaultPPOTorchRLModule):
    def setup(self) -> None:
        super().setup()
        self.pi.net = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 4))


class WithAnotherEncoder(DefaultPPOTorchRLModule):
    def setup(self) -> None:
        super().setup()
        self.encoder.encoder.net = nn.Linear(3, 8)


@pytest.mark.parametrize("of", [WithAnotherHead, WithAnotherEncoder])
def test_a_custom_network_in_rllibs_module_is_called(
    of: type[TorchRLModule],
) -> None:
    assert_same(module(of=of), module(of=of))


def test_a_copy_acts_with_its_own_weights() -> None:
    one, other = module(), module()
    twin = copy.deepcopy(FastForward(other, explore=False))
    other.set_state({key: value + 1 for key, value in other.get_state().items()})

    actual = twin(batch_for(VECTOR))[Columns.ACTION_DIST_INPUTS]

    expected = one.forward_inference(batch_for(VECTOR))[Columns.ACTION_DIST_INPUTS]
    assert torch.equal(actual, expected)


def test_a_hook_that_is_registered_later_is_called() -> None:
    seen: list[Any] = []
    one, other = module(), module()
    forward = FastForward(other, explore=False)
    other.pi.net.mlp[0].register_forward_hook(lambda *_: seen.append(1))

    actual = forward(batch_for(VECTOR))[Columns.ACTION_DIST_INPUTS]

    expected = one.forward_inference(batch_for(VECTOR))[Columns.ACTION_DIST_INPUTS]
    assert torch.equal(actual, expected)
    assert seen == [1]


def test_so_is_a_hook_on_all_modules() -> None:
    seen: list[Any] = []
    one, other = module(), module()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1))
    try:
        forward = FastForward(other, explore=True)
        forward(batch_for(VECTOR), t=0)
    finally:
        handle.remove()

    assert seen
    assert_same(one, other)


def test_a_forward_of_the_users_own_is_called() -> None:
    one, other = module(), module()
    for each in (one, other):
        each.pi.net.forward = lambda values: values * 0 + 3

    assert_same(one, other)


def test_weights_may_change_between_two_steps() -> None:
    one, other = module(), module()
    forward = FastForward(other, explore=True)
    forward(batch_for(VECTOR), t=0)
    for each in (one, other):
        each.set_state({key: value + 1 for key, value in each.get_state().items()})

    expected = one.forward_exploration(batch_for(VECTOR))[Columns.ACTION_DIST_INPUTS]
    actual = forward(batch_for(VECTOR), t=0)[Columns.ACTION_DIST_INPUTS]

    assert torch.equal(actual, expected)


class Dropping(TorchRLModule):
    """Switches its dropout on in each pass, after it has been used once."""

    def setup(self) -> None:
        self.dropout = nn.Dropout(0.5)
        self.policy = nn.Linear(3, 4)

    def _forward(self, batch: dict[str, Any], **_: Any) -> dict[str, Any]:
        values = self.dropout(batch[Columns.OBS])
        values = self.dropout.train()(values)
        return {Columns.ACTION_DIST_INPUTS: self.policy(values)}


class Switching(Dropping):
    """Does something of its own when it is switched."""

    num_switched = 0

    def train(self, mode: bool = True) -> Any:
        self.num_switched += 1
        return super().train(mode)


class Exploring(Dropping):
    """Has a pass of its own round the pass."""

    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        output = super().forward_exploration(batch, **kwargs)
        return {**output, "mine": torch.full((5,), float(kwargs["t"]))}


@pytest.mark.parametrize("of", [Dropping, Switching, Exploring])
def test_modules_of_the_users_own_give_the_same(of: type[TorchRLModule]) -> None:
    assert_same(module(of=of), module(of=of))


def test_what_a_module_does_when_it_is_switched_is_done_as_often() -> None:
    one, other = module(of=Switching), module(of=Switching)

    assert_same(one, other)

    assert one.num_switched == other.num_switched
