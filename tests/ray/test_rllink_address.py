"""``configure`` with an address to listen on, in place of endpoints."""

from typing import Any

import gymnasium
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

from rlmesh_ray.client.channel import ClientTls
from rlmesh_ray.dialects.rllink.runner.plan import RLLINK_KEY
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.rllib import RLMeshRLlinkEnvRunner, configure

OBSERVATIONS = gymnasium.spaces.Box(-1.0, 1.0, (3,))
DISCRETE: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
CONTINUOUS = gymnasium.spaces.Box(-1.0, 1.0, (1,))


@pytest.mark.parametrize(
    ("kind", "actions", "lag"),
    [
        (PPOConfig, DISCRETE, 0),
        (APPOConfig, DISCRETE, 0),
        (DQNConfig, DISCRETE, None),
        (SACConfig, CONTINUOUS, None),
    ],
)
def test_runners_listen_where_configure_is_told(
    kind: type[AlgorithmConfig], actions: gymnasium.Space[Any], lag: int | None
) -> None:
    config = kind().environment(observation_space=OBSERVATIONS, action_space=actions)

    configure(config, "rllink://127.0.0.1:5600", token="secret")

    assert config.env_runner_cls is RLMeshRLlinkEnvRunner
    plan = config.env_config[RLLINK_KEY]
    assert (plan.host, plan.port, plan.token) == ("127.0.0.1", 5600, "secret")
    assert plan.max_weights_lag == lag


def test_spaces_that_nobody_can_be_asked_for_must_be_said() -> None:
    with pytest.raises(ConfigurationError, match=r"environment\(observation_space=.*action_space"):
        configure(PPOConfig(), "rllink://127.0.0.1:5600")


@pytest.mark.parametrize(
    "wrong", [{"num_endpoints": 2}, {"num_envs": 2}, {"tls": ClientTls()}, {"edition_text": "x"}]
)
def test_what_is_for_endpoints_is_refused(wrong: dict[str, Any]) -> None:
    config = PPOConfig().environment(observation_space=OBSERVATIONS, action_space=DISCRETE)

    with pytest.raises(ConfigurationError, match=r"is for endpoints.*configure_rllink"):
        configure(config, "rllink://127.0.0.1:5600", **wrong)


def test_an_address_that_others_reach_wants_a_token() -> None:
    config = PPOConfig().environment(observation_space=OBSERVATIONS, action_space=DISCRETE)

    with pytest.raises(AddressError, match="token"):
        configure(config, "rllink://0.0.0.0:5600")
