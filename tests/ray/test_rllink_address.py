"""``configure_rllink``: the address on which runners listen for simulators."""

from typing import Any

import gymnasium
import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig

from rlmesh_ray.dialects.rllink.runner.listen_plan import RLLINK_KEY
from rlmesh_ray.errors import AddressError, ConfigurationError
from rlmesh_ray.rllib import RLMeshRLlinkEnvRunner, configure, configure_rllink

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
def test_runners_listen_at_the_address(
    kind: type[AlgorithmConfig], actions: gymnasium.Space[Any], lag: int | None
) -> None:
    config = configure_rllink(
        kind(),
        observation_space=OBSERVATIONS,
        action_space=actions,
        address="127.0.0.1:5600",
        token="secret",
    )

    assert config.env_runner_cls is RLMeshRLlinkEnvRunner
    plan = config.env_config[RLLINK_KEY]
    assert (plan.host, plan.port, plan.token) == ("127.0.0.1", 5600, "secret")
    assert plan.max_weights_lag == lag


def test_configure_refuses_an_address_for_simulators_and_names_configure_rllink() -> None:
    remedy = r"configure_rllink\(config, address='127\.0\.0\.1:5600'"
    with pytest.raises(ConfigurationError, match=remedy):
        configure(PPOConfig(), "rllink://127.0.0.1:5600")


def test_an_address_that_other_machines_reach_needs_a_token() -> None:
    with pytest.raises(AddressError, match="token"):
        configure_rllink(
            PPOConfig(),
            observation_space=OBSERVATIONS,
            action_space=DISCRETE,
            address="0.0.0.0:5600",
        )
