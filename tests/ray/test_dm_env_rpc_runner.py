"""RLlib's sampling from a dm_env_rpc server that is not ours."""

from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig

from rlmesh_ray import EnvServer
from rlmesh_ray.dialects.dm_env_rpc.client.settings import DmEnvRpcSettings
from rlmesh_ray.errors import ConfigurationError, ContractMismatchError
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from tests.loopback.dm_env_rpc_peer import CORRIDOR, Conduct, Peer, spec, specs

SETTINGS = DmEnvRpcSettings(
    num_envs=2,
    observations=("place.at",),
    is_bare=True,
    choices_from_zero=True,
    time_limit_steps=9,
    seed="seed",
)


def ppo(**env_runners: Any) -> PPOConfig:
    return PPOConfig().env_runners(num_env_runners=0, **env_runners)


def sampled(config: PPOConfig, num_episodes: int) -> list[Any]:
    runner: Any = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
    try:
        episodes: list[Any] = runner.sample(num_episodes=num_episodes)
        return episodes
    finally:
        runner.stop()


def test_episodes_are_those_of_the_server() -> None:
    with Peer(Conduct(length=4)) as peer:
        config = configure(ppo().debugging(seed=1), peer.address, dm_env_rpc=SETTINGS)
        assert config.num_envs_per_env_runner == 2
        episodes = sampled(config, 6)

        seeds = {settings["seed"] for settings in peer.settings("reset")}
    assert len(episodes) == 6
    for episode in episodes:
        places = np.asarray(episode.get_observations())
        actions = np.asarray(episode.get_actions())
        np.testing.assert_array_equal(places[:, 1], range(5))
        np.testing.assert_array_equal(np.diff(places[:, 0]), actions - 1)
        np.testing.assert_array_equal(episode.get_rewards(), places[1:, 0] + 100)
        assert episode.is_terminated
    assert seeds == {1, 2}


def test_several_sessions_go_their_own_ways_and_cuts_are_cuts() -> None:
    with Peer(Conduct(length=9)) as peer:
        config = configure(ppo(num_envs_per_env_runner=4), [peer.address], dm_env_rpc=SETTINGS)
        episodes = sampled(config, 4)

    # One session may bring more of them than the other.
    assert len(episodes) >= 4
    assert {len(episode) for episode in episodes} == {9}
    assert all(episode.is_truncated and not episode.is_terminated for episode in episodes)


@pytest.mark.slow
def test_lists_may_mix_protocols_where_the_spaces_are_the_same() -> None:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        address = server.address.removeprefix("rlmesh://")
        settings = DmEnvRpcSettings(num_envs=2)
        config = configure(ppo(), [server.address, f"dm_env_rpc://{address}"], dm_env_rpc=settings)
        episodes = sampled(config, 4)

    assert config.num_envs_per_env_runner == 4
    assert all(set(np.asarray(episode.get_rewards())) == {1.0} for episode in episodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [DmEnvRpcSettings(num_envs=3, one_world=True), DmEnvRpcSettings(batched=True)]
)
def test_lanes_of_one_world_end_and_begin_while_others_run(settings: DmEnvRpcSettings) -> None:
    with EnvServer("CartPole-v1", num_envs=3) as server:
        address = f"dm_env_rpc://{server.address.removeprefix('rlmesh://')}"
        config = configure(ppo(), [address], dm_env_rpc=settings, step_timeout_s=10.0)
        episodes = sampled(config, 9)

    assert config.num_envs_per_env_runner == 3
    assert len({len(episode) for episode in episodes}) > 1
    for episode in episodes:
        assert len(episode.get_rewards()) == len(episode)
        assert set(np.asarray(episode.get_rewards())) == {1.0}


def test_settings_for_dm_env_rpc_want_an_address_of_it() -> None:
    with pytest.raises(ConfigurationError, match="no address given begins with dm_env_rpc://"):
        configure(ppo(), "127.0.0.1:1", dm_env_rpc=SETTINGS)


def test_a_server_that_comes_back_is_joined_anew() -> None:
    with Peer() as first:
        config = configure(ppo(), first.address, dm_env_rpc=SETTINGS)
        runner: Any = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        runner.sample(num_episodes=2)
    with Peer(port=first.port) as second:
        episodes = runner.sample(num_episodes=2)
        runner.stop()

        assert second.kinds().count("join_world") == second.kinds().count("leave_world") == 2
    assert sum(len(episode) for episode in episodes if episode.is_done) >= 6


def test_specs_that_change_with_a_reset_stop_the_sampling() -> None:
    changed = specs(CORRIDOR.actions, {1: spec("place.at", np.float32, (3,))})
    with Peer(Conduct(specs_after_reset=changed)) as peer:
        config = configure(ppo().debugging(seed=1), peer.address, dm_env_rpc=SETTINGS)
        with pytest.raises(ContractMismatchError, match=r"'place.at' is another one"):
            sampled(config, 1)
