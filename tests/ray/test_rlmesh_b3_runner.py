"""RLlib samples from the published rlmesh 0.1.0b3; see tests/peers/test_rlmesh_b3.py."""

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from rlmesh_ray.errors import HandshakeRefusedError
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from tests.peers.rlmesh_b3.peer import EDITION_TEXT, serving

pytestmark = pytest.mark.usefixtures("local_ray")


def ppo(num_envs: int) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=42)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    return config


@pytest.mark.parametrize("num_envs", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_the_runner_samples_from_b3_what_rllibs_own_samples_in_process(num_envs: int) -> None:
    own = SingleAgentEnvRunner(config=ppo(num_envs), worker_index=0, num_workers=0)
    theirs = own.sample(num_timesteps=200, random_actions=False)
    own.stop()
    with serving("serve_env", "CartPole-v1", str(num_envs)) as address:
        config = configure(
            ppo(num_envs), f"rlmesh://{address}", edition_text=EDITION_TEXT, inference="torch"
        )
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        ours = runner.sample(num_timesteps=200, random_actions=False)
        runner.stop()

    assert len(ours) == len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.get_observations(), other.get_observations())
        np.testing.assert_array_equal(mine.get_actions(), other.get_actions())
        np.testing.assert_array_equal(mine.get_rewards(), other.get_rewards())
        assert (mine.is_terminated, mine.is_truncated) == (other.is_terminated, other.is_truncated)


def test_an_algorithm_is_not_configured_for_b3_unless_the_user_accepts_its_text() -> None:
    with (
        serving("serve_env", "CartPole-v1", "1") as address,
        pytest.raises(HandshakeRefusedError, match=r"edition_text='rlmesh-0\.1\.0b3'"),
    ):
        configure(ppo(1), f"rlmesh://{address}")
