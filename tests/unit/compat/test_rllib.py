from types import SimpleNamespace
from typing import Any

import pytest
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from rlmesh_ray.compat import rllib as of_rllib


def without_attribute(config: AlgorithmConfig, name: str) -> AlgorithmConfig:
    vars(config).pop(name)
    return config


@pytest.mark.parametrize("kind", ["env_to_module", "module_to_env"])
def test_connectors_that_cannot_be_read_are_custom_ones(kind: str) -> None:
    config = without_attribute(PPOConfig(), f"_{kind}_connector")
    assert of_rllib.connector_of(PPOConfig(), kind) is None

    assert of_rllib.connector_of(config, kind) == of_rllib.UNKNOWN


def test_a_module_that_cannot_be_read_is_a_custom_one() -> None:
    assert of_rllib.module_spec_of(PPOConfig()) is None

    config = without_attribute(PPOConfig(), "_rl_module_spec")

    assert of_rllib.module_spec_of(config) == of_rllib.UNKNOWN


def test_settings_of_a_module_that_cannot_be_read_are_none() -> None:
    config = without_attribute(PPOConfig(), "_model_config")

    assert not of_rllib.model_config_of(config)


def test_an_algorithm_without_a_state_server_has_none() -> None:
    algorithm: Any = SimpleNamespace()

    assert of_rllib.state_server_of(algorithm) is None


def test_an_episode_that_cannot_forget_actions_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(MultiAgentEpisode, "_del_hanging")

    of_rllib.forget_hanging(MultiAgentEpisode(), "a")
