"""RLMeshEnvRunner against RLlib's own runner, and against every autoreset mode."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import tree
from gymnasium.spaces import Box, Dict, Discrete, Text
from gymnasium.vector import AutoresetMode
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

import rlmesh_ray.rllib.runner.slot
from rlmesh_ray import EnvServer
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.runner.env_runner import COMPILED_INFERENCE
from rlmesh_ray.testing.envs import EchoEnv
from tests.ray.ramps import Fragile, Hopeless, Ramp, ramps

pytestmark = pytest.mark.usefixtures("local_ray")


def ppo(num_envs: int, env: Any = "CartPole-v1") -> PPOConfig:
    config = PPOConfig().environment(env).debugging(seed=42)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    return config


def build(kind: type[SingleAgentEnvRunner], config: AlgorithmConfig) -> Any:
    return kind(config=config, worker_index=0, num_workers=0)


def columns(episode: SingleAgentEpisode) -> list[Any]:
    return [
        np.asarray(episode.get_observations()),
        np.asarray(episode.get_actions()),
        np.asarray(episode.get_rewards()),
        episode.is_terminated,
        episode.is_truncated,
        *(np.asarray(part) for _, part in sorted(episode.extra_model_outputs.items())),
    ]


def assert_same_episodes(ours: list[SingleAgentEpisode], theirs: list[SingleAgentEpisode]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        for part, expected in zip(columns(mine), columns(other), strict=True):
            np.testing.assert_array_equal(part, expected)


@pytest.fixture(scope="module")
def pairs() -> Iterator[EnvServer]:
    """An endpoint, 2 lanes wide; each session begins anew."""
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


@pytest.fixture
def runners() -> Iterator[Callable[..., RLMeshEnvRunner]]:
    """Build a runner on new servers, which are stopped at the end."""
    opened: list[Any] = []

    def make(env: Any, *, num_envs: int = 1, num_endpoints: int = 1) -> RLMeshEnvRunner:
        servers = [EnvServer(env, num_envs=num_envs).start() for _ in range(num_endpoints)]
        opened.extend(servers)
        addresses = [server.address for server in servers]
        config = configure(ppo(1), addresses, lockstep=num_endpoints > 1, inference="torch")
        runner: RLMeshEnvRunner = build(RLMeshEnvRunner, config)
        opened.append(runner)
        return runner

    yield make
    for item in reversed(opened):
        item.stop()


def test_texts_that_flattening_leaves_out_do_not_matter() -> None:
    space = Dict({"mission": Text(4), "which": Discrete(3), "where": Box(-2.0, 3.0, (2,))})
    config = ppo(2).env_runners(
        env_to_module_connector=lambda env, spaces, device: FlattenObservations(
            space, keys_to_remove=["mission"]
        )
    )
    with EnvServer(lambda: EchoEnv(space, Discrete(2)), num_envs=2) as server:
        runner = build(RLMeshEnvRunner, configure(config, server.address, inference="torch"))
        episodes = runner.sample(num_timesteps=40)
        runner.stop()

    assert runner.fast_path_disabled_reason is None
    for episode in episodes:
        rows = episode.get_observations()
        assert rows.shape == (len(episode) + 1, 5)
        np.testing.assert_array_equal(rows[:, 2:].sum(axis=1), 1.0)


@pytest.mark.parametrize(
    ("explore", "num_envs", "num_endpoints"),
    [
        (False, 4, 1),
        (True, 2, 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(False, 1, 1), (True, 1, 3)]),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [(False, 2, 2), (False, 1, 3), (True, 1, 1), (True, 4, 1)]
        ),
    ],
)
def test_episodes_equal_those_of_rllibs_own_runner(
    runners: Callable[..., RLMeshEnvRunner], num_envs: int, num_endpoints: int, explore: bool
) -> None:
    theirs = build(SingleAgentEnvRunner, ppo(num_envs * num_endpoints))
    expected = [theirs.sample(num_timesteps=300, explore=explore) for _ in range(2)]
    theirs.stop()

    ours = runners("CartPole-v1", num_envs=num_envs, num_endpoints=num_endpoints)
    actual = [ours.sample(num_timesteps=300, explore=explore) for _ in range(2)]

    for mine, other in zip(actual, expected, strict=True):
        assert_same_episodes(mine, other)


@pytest.mark.nightly
def test_whole_episodes_equal_those_of_rllibs_own_runner(
    runners: Callable[..., RLMeshEnvRunner],
) -> None:
    theirs = build(SingleAgentEnvRunner, ppo(3))
    expected = theirs.sample(num_episodes=7, explore=False)
    theirs.stop()

    actual = runners("CartPole-v1", num_envs=3).sample(num_episodes=7, explore=False)

    assert_same_episodes(actual, expected)


def test_a_seed_gives_the_same_episodes_in_each_run_although_they_are_compiled(
    pairs: EnvServer,
) -> None:
    runs = []
    for _ in range(2):
        runner = build(RLMeshEnvRunner, configure(ppo(2), pairs.address))
        runs.append([runner.sample(num_timesteps=200) for _ in range(2)])
        runner.stop()
        assert runner.torch_inference_reason is None

    for mine, other in zip(*runs, strict=True):
        assert_same_episodes(mine, other)


@pytest.mark.parametrize("explore", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_recurrent_module_runs_compiled_on_rllibs_per_item_path(
    pairs: EnvServer, explore: bool
) -> None:
    model = {"use_lstm": True, "lstm_cell_size": 8, "max_seq_len": 4}
    runs = []
    for inference in ("torch", "compiled"):
        config = ppo(2).rl_module(model_config=model)
        config = configure(config, pairs.address, inference=inference)
        runner = build(RLMeshEnvRunner, config)
        chunks = runner.sample(num_timesteps=60, explore=explore)
        with torch.no_grad():  # as weights come from a learner
            for weight in runner.module.parameters():
                weight.mul_(1.5)
        runs.append([*chunks, *runner.sample(num_timesteps=60, explore=explore)])
        runner.stop()

    assert runner.fast_path_disabled_reason == "the module has a state"
    assert runner.torch_inference_reason is None
    assert runner.metrics.peek(COMPILED_INFERENCE) == 1.0
    for mine, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(mine.get_actions(), other.get_actions())
        for key in other.extra_model_outputs:
            outputs = (tree.flatten(each.get_extra_model_outputs(key)) for each in (mine, other))
            for part, expected in zip(*outputs, strict=True):
                np.testing.assert_allclose(part, expected, atol=1e-5)


class Noisy(DefaultPPOTorchRLModule):
    """Adds noise, which no two runs have in common."""

    def _forward(self, batch: Any, **kwargs: Any) -> Any:
        found = super()._forward(batch, **kwargs)
        return found | {Columns.ACTION_DIST_INPUTS: torch.rand_like(found["action_dist_inputs"])}


def test_a_module_that_has_to_be_compiled_and_cannot_be_ends_the_training(pairs: EnvServer) -> None:
    config = ppo(2).rl_module(rl_module_spec=RLModuleSpec(module_class=Noisy))
    runner = build(RLMeshEnvRunner, configure(config, pairs.address, inference="compiled"))

    with pytest.raises(ConfigurationError, match="Noisy computes something else") as caught:
        runner.apply(lambda actor: actor.sample(num_timesteps=4))  # as RLlib calls it
    runner.stop()

    assert runner.broken_environment is caught.value


def test_exploration_that_depends_on_steps_stays_in_torch_on_rllibs_per_item_path(
    pairs: EnvServer,
) -> None:
    config = DQNConfig().environment("CartPole-v1")
    config.env_runners(num_env_runners=0, rollout_fragment_length=16)
    runner = build(RLMeshEnvRunner, configure(config, pairs.address, fast_path=False))
    runner.sample(num_timesteps=20, explore=True)
    reason = runner.torch_inference_reason
    runner.sample(num_timesteps=40, explore=False)
    runner.stop()

    assert "depends on the number of steps" in reason
    assert runner.torch_inference_reason != reason


@pytest.mark.parametrize(
    "env",
    [
        pytest.param(Ramp, marks=pytest.mark.nightly),
        lambda: ramps(AutoresetMode.NEXT_STEP),
        lambda: ramps(AutoresetMode.DISABLED),
        lambda: ramps(AutoresetMode.SAME_STEP),
    ],
    ids=["one lane", "NEXT_STEP", "DISABLED", "SAME_STEP"],
)
def test_no_transition_is_lost_doubled_or_stitched_in_any_autoreset_mode(
    runners: Callable[..., RLMeshEnvRunner], env: Any
) -> None:
    runner = runners(env)
    chunks = [chunk for _ in range(4) for chunk in runner.sample(num_timesteps=60)]

    by_episode: dict[str, list[SingleAgentEpisode]] = {}
    for chunk in chunks:
        by_episode.setdefault(chunk.id_, []).append(chunk)

    num_ended = 0
    for parts in by_episode.values():
        rewards = np.concatenate([part.get_rewards() for part in parts])
        observations = np.concatenate(
            [parts[0].get_observations()] + [part.get_observations()[1:] for part in parts[1:]]
        )
        np.testing.assert_array_equal(rewards, np.arange(1, len(rewards) + 1))
        np.testing.assert_array_equal(observations[:, 0], np.arange(len(rewards) + 1))
        assert all(not part.is_done for part in parts[:-1])
        num_ended += parts[-1].is_done
    assert num_ended > 10
    assert sum(len(chunk) for chunk in chunks) >= 4 * 60


def test_metrics_count_what_was_sampled(pairs: EnvServer) -> None:
    runner = build(RLMeshEnvRunner, configure(ppo(2), pairs.address))
    episodes = runner.sample(num_timesteps=100, random_actions=True)
    runner.stop()

    metrics = runner.get_metrics()

    assert metrics["num_env_steps_sampled"].peek() == sum(len(episode) for episode in episodes)
    assert metrics["num_episodes"].peek() == sum(episode.is_done for episode in episodes)


def test_a_failing_environment_does_not_leave_sample(
    runners: Callable[..., RLMeshEnvRunner],
) -> None:
    runner = runners(Fragile)
    runner.sample(num_timesteps=6)

    episodes = runner.sample(num_timesteps=6)

    assert sum(len(episode) for episode in episodes) >= 6
    assert runner.get_metrics()["num_env_step_failures"].peek() >= 1
    for episode in episodes:
        rewards = episode.get_rewards()
        np.testing.assert_array_equal(rewards, rewards[0] + np.arange(len(rewards)))


def test_an_environment_that_never_works_ends_sample_with_its_error(
    runners: Callable[..., RLMeshEnvRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rlmesh_ray.rllib.runner.slot, "_MAX_ENV_FAILURES", 2)
    with pytest.raises(Exception, match="RuntimeError: never"):
        runners(Hopeless).sample(num_timesteps=20)


def test_the_config_gets_width_and_spaces_from_the_endpoint(pairs: EnvServer) -> None:
    config = configure(ppo(1), f"rlmesh://{pairs.address}")

    own = gymnasium.make("CartPole-v1")
    assert config.num_envs_per_env_runner == 2
    assert config.observation_space == own.observation_space
    assert config.action_space == own.action_space
    assert config.env_runner_cls is RLMeshEnvRunner


def test_endpoints_that_differ_are_refused_on_the_driver(pairs: EnvServer) -> None:
    with (
        EnvServer("CartPole-v1", num_envs=3) as other,
        pytest.raises(ContractMismatchError, match="num_envs = 3"),
    ):
        configure(ppo(1), [pairs.address, other.address])


def test_a_width_that_was_changed_after_configure_is_refused(pairs: EnvServer) -> None:
    config = configure(ppo(1), pairs.address).env_runners(num_envs_per_env_runner=5)

    with pytest.raises(ContractMismatchError, match="give 2 lanes"):
        build(RLMeshEnvRunner, config)


def test_endpoints_that_run_already_take_no_width() -> None:
    with pytest.raises(ConfigurationError, match="already have their own"):
        configure(ppo(1), "127.0.0.1:1", num_envs=3)


def test_a_config_without_endpoints_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="configure"):
        build(RLMeshEnvRunner, ppo(1))
