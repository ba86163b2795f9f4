"""configure() with sources that cannot work, and what it makes of those that can."""

import gc
import math
from typing import Any

import gymnasium
import pytest
from ray.rllib.algorithms.ppo import PPOConfig

import rlmesh_ray.rllib.env_runner
from rlmesh_ray import EnvServer
from rlmesh_ray.actors import EnvFleet
from rlmesh_ray.errors import (
    AccessDeniedError,
    ConfigurationError,
    EndpointError,
    EnvStartError,
)
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.configure import endpoint_cpus

pytestmark = pytest.mark.usefixtures("local_ray")


def ppo() -> PPOConfig:
    return PPOConfig().env_runners(num_env_runners=0)


def runner(config: Any) -> Any:
    return RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)


def broken_factory() -> Any:
    raise OSError("no display")


@pytest.mark.parametrize("env", [None, [], [1, 2], 7])
def test_what_is_no_source_of_environments_is_refused(env: Any) -> None:
    with pytest.raises(ConfigurationError, match="give a Gymnasium id"):
        configure(ppo(), env)


def test_an_instance_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigurationError, match="served by EnvServer"):
        configure(ppo(), gymnasium.make("CartPole-v1"))  # type: ignore[arg-type]


def test_a_factory_that_fails_is_named_in_one_line() -> None:
    with pytest.raises(EnvStartError, match="OSError: no display") as caught:
        configure(ppo(), broken_factory)

    assert "\n" not in str(caught.value)


def test_no_endpoints_are_not_taken_for_the_default() -> None:
    with pytest.raises(ConfigurationError, match="num_endpoints=0"):
        configure(ppo(), "CartPole-v1", num_endpoints=0)


def test_a_config_of_the_old_api_stack_is_refused() -> None:
    config = ppo().api_stack(
        enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False
    )

    with pytest.raises(ConfigurationError, match="old API stack"):
        configure(config, "127.0.0.1:1")


def test_a_fleet_that_only_the_config_knows_lives_on() -> None:
    config = configure(ppo(), EnvFleet("CartPole-v1", num_cpus=0.1))
    gc.collect()

    sampler = runner(config)

    assert sampler.sample(num_timesteps=5)
    sampler.stop()


def test_the_token_does_not_show_in_the_config() -> None:
    with EnvServer("CartPole-v1", token="open-sesame") as server:
        config = configure(ppo(), server.address, token="open-sesame")

    assert "open-sesame" not in repr(config.env_config)


def test_sampling_goes_on_after_an_outage_that_has_left_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rlmesh_ray.rllib.env_runner, "_CONNECT_ATTEMPTS", 1)
    with EnvServer("CartPole-v1") as server:
        sampler = runner(configure(ppo(), server.address))
        sampler.sample(num_timesteps=5)
        server.stop(0.0)
        with pytest.raises(EndpointError):
            sampler.sample(num_timesteps=5)

        with EnvServer("CartPole-v1", address=server.address):
            episodes = sampler.sample(num_timesteps=5)
            sampler.stop()

    assert sum(len(episode) for episode in episodes) >= 5


def test_a_wrong_token_is_not_tried_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with EnvServer("CartPole-v1", token="old") as server:
        config = configure(ppo(), server.address, token="old")
        address = server.address
    with EnvServer("CartPole-v1", token="new", address=address):
        monkeypatch.setattr(rlmesh_ray.rllib.env_runner, "_FIRST_DELAY_S", math.inf)
        with pytest.raises(AccessDeniedError):
            runner(config)


# The Ray of these tests has 16 logical CPUs.
@pytest.mark.parametrize(
    ("num_env_runners", "num_endpoints", "num_cpus"), [(0, 2, 1.0), (15, 2, 0.5), (16, 1, 0.01)]
)
def test_endpoints_leave_the_runners_room(
    num_env_runners: int, num_endpoints: int, num_cpus: float
) -> None:
    config = ppo().env_runners(num_env_runners=num_env_runners)

    assert endpoint_cpus(config, num_endpoints) == pytest.approx(num_cpus)
