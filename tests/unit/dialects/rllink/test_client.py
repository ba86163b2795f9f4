"""What a simulator computes with its model is what RLlib's module computes."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from rlmesh_ray.dialects.rllink import wire as m
from rlmesh_ray.dialects.rllink.client import LocalAgent, OnnxPolicy
from rlmesh_ray.dialects.rllink.runner.client_session import ModuleCopy, action_transform_for
from rlmesh_ray.dialects.rllink.runner.env_runner import recomputed_outputs
from rlmesh_ray.dialects.rllink.runner.listen_plan import (
    RLlinkPlan,
    SampleSpaces,
    client_config,
    weights_extras,
)
from rlmesh_ray.dialects.rllink.runner.sample_queue import WeightsVersion
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.rllib.forward import (
    distribution_inputs,
    distribution_of,
    exported_module,
)

VECTOR = gymnasium.spaces.Box(-1, 1, (4,))
PICTURE = gymnasium.spaces.Box(0, 1, (64, 64, 3))
BYTES = gymnasium.spaces.Box(0, 9, (4,), np.uint8)
CHOICE: gymnasium.Space[Any] = gymnasium.spaces.Discrete(3)
TORQUE = gymnasium.spaces.Box(np.array([-2, 0], "f4"), np.array([2, 5], "f4"))

CASES = {
    "PPO, discrete": (PPOConfig(), VECTOR, CHOICE, "categorical"),
    "PPO, of pixels": (PPOConfig(), PICTURE, CHOICE, "categorical"),
    "PPO, of bytes": (PPOConfig(), BYTES, CHOICE, "categorical"),
    # Biases that are equal at the beginning, and are not afterwards.
    "PPO, zero biases": (
        PPOConfig().rl_module(model_config=DefaultModelConfig(fcnet_bias_initializer="zeros_")),
        VECTOR,
        CHOICE,
        "categorical",
    ),
    "PPO, continuous": (PPOConfig(), VECTOR, TORQUE, "diag_gaussian"),
    "DQN, dueling": (DQNConfig(), VECTOR, CHOICE, "epsilon_greedy"),
    "DQN, plain": (DQNConfig().training(dueling=False), VECTOR, CHOICE, "epsilon_greedy"),
    "SAC": (SACConfig(), VECTOR, TORQUE, "squashed_gaussian"),
}
EVERY_CASE = pytest.mark.parametrize("name", CASES)


class Made:
    """A module, its model, and a client that has it."""

    def __init__(self, name: str) -> None:
        config, self.obs_space, self.action_space, self.kind = CASES[name]
        self.config: AlgorithmConfig = copy.deepcopy(config)
        self.config.environment(observation_space=self.obs_space, action_space=self.action_space)
        torch.manual_seed(3)
        spaces = {"default_policy": (self.obs_space, self.action_space)}
        self.module: Any = self.config.get_rl_module_spec(
            spaces=spaces, inference_only=True
        ).build()
        self.model = exported_module(self.module, self.obs_space, "obs")
        for parameter in self.module.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        self.weights = WeightsVersion(
            5, self.module.get_state(), weights_extras(self.module, num_env_steps=0)
        )

    def client(self, **changed: Any) -> OnnxPolicy:
        spaces = SampleSpaces(self.obs_space, self.action_space)
        reported = client_config(self.config, RLlinkPlan("127.0.0.1", 0), spaces, self.module, 10)
        policy = OnnxPolicy(m.SetConfig(10, True, reported.extras | changed), seed=1)
        extras = self.weights.extras
        policy.load(m.SetState(5, self.weights.onnx(self.model), extras=extras))
        return policy

    def observations(self, num: int) -> Any:
        self.obs_space.seed(4)
        return np.stack([self.obs_space.sample() for _ in range(num)])


@EVERY_CASE
def test_the_models_output_is_the_modules(name: str) -> None:
    made = Made(name)
    obs = made.observations(7)

    with torch.no_grad():
        expected = distribution_inputs(made.module, torch.as_tensor(obs)).numpy()
    found = made.client().distribution_inputs(obs)

    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-5
    assert distribution_of(made.module) == made.kind


@EVERY_CASE
def test_without_exploration_the_client_acts_as_rllib_does(name: str) -> None:
    made = Made(name)
    obs = made.observations(7)
    policy = made.client(explore=False)

    with torch.no_grad():
        inputs = distribution_inputs(made.module, torch.as_tensor(obs))
        kind = made.module.get_inference_action_dist_cls()
        expected = kind.from_logits(inputs).to_deterministic().sample().numpy()
    drawn = policy.act(obs)

    assert np.allclose(drawn, expected, atol=1e-5)
    fit = action_transform_for(made.action_space, normalize=True, clip=False)
    for one, reference in zip(drawn, expected, strict=True):
        sent = policy.for_environment(one)
        assert np.allclose(sent, fit(reference), atol=1e-5)


@pytest.mark.parametrize("name", ["PPO, discrete", "PPO, continuous", "DQN, dueling", "SAC"])
def test_with_exploration_the_client_draws_from_the_same_distribution(name: str) -> None:
    made = Made(name)
    if made.kind == "epsilon_greedy":
        made.weights.extras["epsilon"] = 0.3
    obs = np.repeat(made.observations(1), 2000, axis=0)
    drawn = made.client().act(obs)

    with torch.no_grad():
        inputs = distribution_inputs(made.module, torch.as_tensor(obs))
    if made.kind == "epsilon_greedy":
        share = np.mean(drawn == int(inputs[0].argmax()))
        assert abs(share - (0.7 + 0.3 / 3)) < 0.04
        return
    torch.manual_seed(1)
    theirs = made.module.get_exploration_action_dist_cls().from_logits(inputs).sample().numpy()
    assert np.allclose(drawn.mean(axis=0), theirs.mean(axis=0), atol=0.1)
    assert np.allclose(drawn.std(axis=0), theirs.std(axis=0), atol=0.1)


@pytest.mark.parametrize("name", ["PPO, discrete", "PPO, continuous", "SAC"])
def test_what_a_client_leaves_out_is_worked_out_with_the_weights_that_acted(name: str) -> None:
    made = Made(name)
    module = ModuleCopy(made.module)
    policy = made.client()
    chunks = []
    for num_steps in (3, 1):
        obs = made.observations(num_steps + 1)
        chunks.append(m.Chunk(obs, policy.act(obs[:-1]), np.ones(num_steps), False, False))
    state = {key: np.array(value) for key, value in made.weights.state.items()}
    acted = WeightsVersion(5, state, {})
    for parameter in made.module.parameters():
        parameter.data += 1.0  # the learner has gone on

    for chunk, outputs in zip(chunks, recomputed_outputs(module, acted, chunks), strict=True):
        inputs = policy.distribution_inputs(chunk.obs[:-1])
        assert np.abs(outputs["action_dist_inputs"] - inputs).max() < 1e-5
        kind = made.module.get_exploration_action_dist_cls()
        logp = kind.from_logits(torch.as_tensor(inputs)).logp(torch.as_tensor(chunk.actions))
        assert np.allclose(outputs["action_logp"], logp.numpy(), atol=1e-4)


class Listener:
    """Stands for a connection; keeps what is sent."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self.chunks: list[m.Chunk] = []

    def get_config(self) -> m.SetConfig:
        """Return how to sample: two steps a message."""
        spaces = SampleSpaces(self._made.obs_space, self._made.action_space)
        return client_config(self._made.config, RLlinkPlan("h", 0), spaces, self._made.module, 2)

    def get_state(self) -> m.SetState:
        """Return the weights."""
        return m.SetState(5, self._made.weights.onnx(self._made.model))

    def exchange(self, chunks: list[m.Chunk], _seq_no: int) -> m.SetState:
        """Take episodes."""
        self.chunks += chunks
        return self.get_state()


def test_what_an_agent_has_seen_stays_what_it_was() -> None:
    listener: Any = Listener(Made("PPO, continuous"))
    agent = LocalAgent(listener, seed=1)
    obs = np.zeros(4, np.float32)  # a simulator's own, which it fills again and again

    for number in range(3):
        obs[:] = number
        action = agent.step(obs, 1.0) if number else agent.begin(obs)
        action *= 0

    (chunk,) = listener.chunks
    assert chunk.obs.tolist() == [[0] * 4, [1] * 4, [2] * 4]
    assert chunk.actions.all()


def test_what_is_worked_out_in_parts_is_the_same() -> None:
    made = Made("PPO, discrete")
    obs = np.random.default_rng(1).uniform(-1, 1, (2501, 4)).astype("f4")
    actions = np.arange(2500) % 3

    def outputs(first: int, count: int) -> Any:
        end = first + count
        chunk = m.Chunk(obs[first : end + 1], actions[first:end], np.zeros(count), False, False)
        (found,) = recomputed_outputs(ModuleCopy(made.module), made.weights, [chunk])
        return found

    whole, parts = outputs(0, 2500), [outputs(first, 500) for first in range(0, 2500, 500)]

    for name in m.MODEL_OUTPUTS:
        joined = np.concatenate([part[name] for part in parts])
        assert np.allclose(whole[name], joined, atol=1e-6)


def test_the_input_can_have_the_name_that_old_clients_expect() -> None:
    import onnxruntime

    made = Made("PPO, discrete")
    model = exported_module(made.module, VECTOR, "onnx::Gemm_0").serialized(made.weights.state)

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["onnx::Gemm_0"]
    (found,) = session.run(None, {"onnx::Gemm_0": np.zeros((5, 4), "f4")})
    assert found.shape == (5, 3)


def test_a_model_that_would_read_a_file_of_the_client_is_refused() -> None:
    import onnx

    made = Made("PPO, discrete")
    model = onnx.load_model_from_string(made.weights.onnx(made.model))
    weights = model.graph.initializer[0]
    weights.ClearField("raw_data")
    weights.data_location = onnx.TensorProto.EXTERNAL
    weights.external_data.add(key="location", value="../secret")
    state = m.SetState(6, model.SerializeToString(), extras={})

    with pytest.raises(ConfigurationError, match="the server's model keeps the numbers of"):
        made.client().load(state)


class Unwritable(torch.nn.Module):
    """Does what no model can express."""

    def forward_exploration(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {Columns.ACTION_DIST_INPUTS: torch.linalg.pinv(batch[Columns.OBS])}


def test_a_module_that_cannot_be_a_model_is_named() -> None:
    module: Any = Unwritable()

    with pytest.raises(ConfigurationError, match="Unwritable cannot be written as ONNX"):
        exported_module(module, VECTOR, "obs")


def test_a_distribution_that_clients_do_not_know_is_named_on_both_sides() -> None:
    made = Made("PPO, discrete")
    made.module.action_dist_cls = Unwritable

    with pytest.raises(ConfigurationError, match="actions of Unwritable can be drawn by torch"):
        distribution_of(made.module)
    with pytest.raises(ConfigurationError, match="draws actions from 'dice'"):
        OnnxPolicy(m.SetConfig(1, True, {"action_distribution": "dice"}))


def test_a_pickled_config_holds_neither_the_token_nor_our_runner() -> None:
    import pickle

    from rlmesh_ray.rllib import configure_rllink

    config = configure_rllink(
        PPOConfig(),
        observation_space=VECTOR,
        action_space=CHOICE,
        token="s3cret",
        sends_pickled_config=True,
    )
    plan = config.env_config["rlmesh_ray_rllink"]

    reported = client_config(
        config, plan, SampleSpaces(VECTOR, CHOICE), Made("PPO, discrete").module, 7
    )

    assert b"s3cret" not in reported.pickled_config
    assert b"rlmesh" not in reported.pickled_config
    assert pickle.loads(reported.pickled_config).get_rollout_fragment_length() == 7
    plain = client_config(
        config, RLlinkPlan("h", 0), SampleSpaces(VECTOR, CHOICE), Made("PPO, discrete").module, 7
    )
    assert plain.pickled_config == b""
