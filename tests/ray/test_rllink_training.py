"""Algorithms learn from simulators that connect to them."""

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

from rlmesh_ray.rllib import configure_rllink
from tests.ray.rllink_simulators import Simulators, asking, local

pytestmark = pytest.mark.usefixtures("local_ray")

Build = Callable[..., Algorithm]


@pytest.fixture
def simulators() -> Iterator[Simulators]:
    made = Simulators()
    yield made
    made.stop()


@pytest.fixture
def build(simulators: Simulators) -> Iterator[Build]:
    built: list[Algorithm] = []

    def make(
        config: AlgorithmConfig, env_id: str = "CartPole-v1", way: Any = local, **options: Any
    ) -> Algorithm:
        env = gymnasium.make(env_id)
        configure_rllink(
            config,
            observation_space=env.observation_space,
            action_space=env.action_space,
            address="127.0.0.1:0",
            **options,
        )
        built.append(config.build_algo())
        addresses = built[-1].env_runner_group.foreach_env_runner(lambda runner: runner.address)
        for address in filter(None, addresses):
            for _ in range(options.get("num_simulators", 1)):
                simulators.start(address, way, env=env_id)
        return built[-1]

    yield make
    for algorithm in built:
        algorithm.stop()


def best_return(algorithm: Algorithm, goal: float, num_iterations: int) -> float:
    best = float("-inf")
    for _ in range(num_iterations):
        result = algorithm.train().get("env_runners", {})
        best = max(best, result.get("episode_return_mean", best))
        if best >= goal:
            break
    return best


@pytest.mark.slow
def test_every_iteration_learns_from_steps_of_its_own_weights(build: Build) -> None:
    config = PPOConfig().env_runners(num_env_runners=1)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    algorithm = build(config, num_simulators=2)

    results = [algorithm.train()["env_runners"] for _ in range(3)]

    assert [result["num_env_steps_sampled"] for result in results] == [128] * 3
    stale = [result["num_stale_env_steps_dropped_lifetime"] for result in results]
    # Only steps of a simulator that was not there yet when the first sample was asked for.
    assert stale[0] == 0
    assert stale[1] == stale[2] in (0, 64)
    assert [result["weights_seq_no"] for result in results] == [0, 1, 2]
    assert results[-1]["num_simulators_per_env_runner"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(local, id="local"),
        pytest.param(asking, id="asking", marks=pytest.mark.nightly),
    ],
)
def test_ppo_learns(way: Any, build: Build) -> None:
    config = PPOConfig().env_runners(num_env_runners=0).debugging(seed=1)
    config.training(train_batch_size_per_learner=2000, minibatch_size=250, num_epochs=8, lr=1e-3)
    config.rl_module(model_config={"fcnet_hiddens": [32]})

    assert best_return(build(config, way=way, num_simulators=3), 200.0, 30) >= 200.0


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_appo_learns_with_runners_that_pull_their_weights(build: Build) -> None:
    config = APPOConfig().env_runners(num_env_runners=2).debugging(seed=1)
    config.training(train_batch_size_per_learner=500, lr=1e-3, entropy_coeff=0.0)
    config.rl_module(model_config={"fcnet_hiddens": [32]})
    config.reporting(min_time_s_per_iteration=3)

    algorithm = build(config, num_simulators=2)
    # A policy that knows nothing makes about 22.
    assert best_return(algorithm, 60.0, 25) >= 60.0


@pytest.mark.slow
def test_appo_goes_on_when_no_simulator_is_there(build: Build, simulators: Simulators) -> None:
    config = APPOConfig().env_runners(num_env_runners=1)
    config.training(train_batch_size_per_learner=100)
    config.reporting(min_time_s_per_iteration=2)
    algorithm = build(config, wait_s=0.5, num_simulators=1)
    algorithm.train()
    # Later on, the runner would be waiting for simulators, and not answer.
    address = next(filter(None, algorithm.env_runner_group.foreach_env_runner(
        lambda runner: runner.address, local_env_runner=False
    )))  # fmt: skip

    simulators.hang_up()
    for _ in range(2):
        algorithm.train()

    again = Simulators()
    again.start(address)
    results = [algorithm.train() for _ in range(2)]
    num_healthy = algorithm.env_runner_group.num_healthy_remote_workers()
    algorithm.stop()
    again.stop()
    assert results[-1]["env_runners"]["num_env_steps_sampled"] > 0
    assert num_healthy == 1


@pytest.mark.nightly
def test_dqn_learns_discrete_actions(build: Build) -> None:
    config = DQNConfig().env_runners(num_env_runners=0).debugging(seed=1)
    config.training(
        lr=1e-3,
        train_batch_size_per_learner=32,
        training_intensity=8.0,
        num_steps_sampled_before_learning_starts=200,
        target_network_update_freq=200,
        epsilon=[(0, 1.0), (2000, 0.02)],
        n_step=3,
    )
    config.rl_module(model_config={"fcnet_hiddens": [64]})

    # Actions drawn at random make 2 of 8. (CartPole was a matter of luck here: 40 iterations
    # ended between 39 and 200.)
    assert best_return(build(config, "RLlinkRepeat-v0"), 6.0, 40) >= 6.0


@pytest.mark.nightly
def test_sac_learns_continuous_actions(build: Build) -> None:
    config = SACConfig().env_runners(num_env_runners=0, rollout_fragment_length=32)
    config.debugging(seed=1).training(
        train_batch_size_per_learner=64,
        training_intensity=64.0,
        num_steps_sampled_before_learning_starts=200,
        actor_lr=1e-3,
        critic_lr=1e-3,
        alpha_lr=1e-3,
        lr=None,
        n_step=1,
    )
    config.rl_module(model_config={"fcnet_hiddens": [64]})

    # A random draw is 2.7 off in the mean.
    assert best_return(build(config, "RLlinkAim-v0"), -0.5, 60) >= -0.5
