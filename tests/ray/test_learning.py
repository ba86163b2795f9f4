"""PPO learns through endpoints what it learns without them."""

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer
from rlmesh_ray.rllib import configure
from rlmesh_ray.rllib.training import Progress, train

pytestmark = pytest.mark.usefixtures("local_ray")

NUM_ENVS = 8
NUM_ITERATIONS = 8


def ppo(seed: int) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=seed)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=NUM_ENVS)
    config.training(train_batch_size_per_learner=2048, minibatch_size=256, num_epochs=6, lr=1e-3)
    return config


def returns(progress: list[Progress]) -> list[float]:
    return [point.return_mean for point in progress]


def test_the_learning_curve_is_the_same_to_the_last_digit() -> None:
    without = list(train(ppo(seed=3), stop_iters=NUM_ITERATIONS))

    with EnvServer("CartPole-v1", num_envs=NUM_ENVS) as server:
        through = list(train(configure(ppo(seed=3), server.address), stop_iters=NUM_ITERATIONS))

    assert returns(through) == returns(without)
    assert [point.env_steps for point in through] == [point.env_steps for point in without]
    assert np.mean(returns(through)[-2:]) > 2 * returns(through)[0]
