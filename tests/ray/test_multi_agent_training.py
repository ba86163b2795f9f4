"""Algorithms with several policies learn through endpoints."""

from typing import Any

import numpy as np
import pytest
from pettingzoo import ParallelEnv
from pettingzoo.test import parallel_api_test
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv
from ray.tune.registry import register_env

from rlmesh_ray import EnvServer
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.rllib import RLMeshMultiAgentEnvRunner, configure
from tests.ray.multi_agent_worlds import Hunt

pytestmark = [
    pytest.mark.usefixtures("local_ray"),
    # RLlib registers its own runner's environment anew each time.
    pytest.mark.filterwarnings("ignore:.*Overriding environment rllib-multi-agent-env"),
]

HUNTERS = Hunt.possible_agents
NUM_ENVS = 4


class PettingHunt(Hunt, ParallelEnv[str, Any, Any]):
    """PettingZoo's own base class brings nothing that changes anything."""


def policy_of(agent_id: str, *_args: Any, **_kwargs: Any) -> str:
    return agent_id


def ppo(num_env_runners: int = 0, batch: int = 512) -> PPOConfig:
    register_env("hunt", lambda context: ParallelPettingZooEnv(PettingHunt()))
    config = PPOConfig().environment("hunt", disable_env_checking=True).debugging(seed=3)
    config.env_runners(num_env_runners=num_env_runners, num_envs_per_env_runner=NUM_ENVS)
    config.training(train_batch_size_per_learner=batch, minibatch_size=128, num_epochs=6, lr=3e-3)
    config.rl_module(model_config={"fcnet_hiddens": [32]})
    return config.multi_agent(policies=set(HUNTERS), policy_mapping_fn=policy_of)


def returns(config: PPOConfig, num_iterations: int) -> list[tuple[float, dict[str, float]]]:
    algorithm = config.build_algo()
    try:
        results = [algorithm.train()["env_runners"] for _ in range(num_iterations)]
    finally:
        algorithm.stop()
    return [
        (result["episode_return_mean"], dict(result["agent_episode_returns_mean"]))
        for result in results
    ]


def test_the_tests_environment_is_one_of_pettingzoo() -> None:
    parallel_api_test(PettingHunt(), num_cycles=100)


@pytest.mark.slow
def test_two_policies_become_the_same_to_the_last_digit() -> None:
    without = returns(ppo(batch=128), 2)

    with EnvServer(PettingHunt, num_envs=NUM_ENVS) as server:
        through = returns(configure(ppo(batch=128), server.address), 2)

    assert through == without
    assert through[0][1].keys() == set(HUNTERS)


@pytest.mark.slow
def test_agents_that_rllib_names_by_integers_are_mapped_to_policies() -> None:
    def cart_poles() -> Any:
        return make_multi_agent("CartPole-v1")({"num_agents": 2})

    config = PPOConfig().debugging(seed=3).env_runners(num_env_runners=0)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    config.multi_agent(
        policies={"even", "odd"},
        policy_mapping_fn=lambda agent_id, *_args, **_kwargs: ("even", "odd")[agent_id % 2],
    )

    with EnvServer(cart_poles, num_envs=2) as server:
        algorithm = configure(config, server.address).build_algo()
        try:
            result = algorithm.train()
        finally:
            algorithm.stop()

    sampled = result["env_runners"]
    assert sampled["num_env_steps_sampled"] >= 128
    assert sampled["agent_episode_returns_mean"].keys() == {"0", "1"}
    assert sampled["module_episode_returns_mean"].keys() == {"even", "odd"}
    assert {"even", "odd"} <= result["learners"].keys()


@pytest.mark.slow
def test_two_policies_learn_through_an_endpoint() -> None:
    with EnvServer(PettingHunt, num_envs=NUM_ENVS) as server:
        progress = returns(configure(ppo(), server.address), 5)

    assert progress[-1][0] > progress[0][0] + 0.5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runners_of_their_own_sample_from_a_fleet_and_evaluate() -> None:
    with EnvFleet(PettingHunt, num_endpoints=2, num_envs=NUM_ENVS, num_cpus=0.1) as fleet:
        config = ppo(num_env_runners=2).evaluation(
            evaluation_interval=1,
            evaluation_num_env_runners=1,
            evaluation_duration=8,
            evaluation_config={"seed": None},
        )
        algorithm = configure(config, fleet).build_algo()
        result = algorithm.train()
        algorithm.stop()

    assert config.env_runner_cls is RLMeshMultiAgentEnvRunner
    assert result["env_runners"]["num_env_steps_sampled"] >= 512
    assert result["env_runners"]["num_env_step_failures"] == 0
    assert result["env_runners"]["num_episodes_interrupted_lifetime"] == 0
    assert np.isfinite(result["evaluation"]["env_runners"]["episode_return_mean"])
