"""RLlib samples and learns from environments that the released rlmesh serves.

See tests/peers/test_our_clients_on_released_servers.py.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.runner.session_recovery import INTERRUPTED_KEY
from tests.peers.rlmesh_released.peer import serving
from tests.ray.logged_stairs import LOG_VARIABLE
from tests.ray.lost_endpoints import Background, Steps, assert_unbroken

pytestmark = [pytest.mark.usefixtures("local_ray"), pytest.mark.slow]

TIMEOUT_S = 120.0
STAIRS = "tests.ray.logged_stairs:LoggedStairs-v0"


def ppo(num_envs: int) -> PPOConfig:
    config = PPOConfig().environment("CartPole-v1").debugging(seed=42)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    return config


def sampled(config: PPOConfig, runner_class: type) -> list[SingleAgentEpisode]:
    runner = runner_class(config=config, worker_index=0, num_workers=0)
    try:
        episodes: list[SingleAgentEpisode] = runner.sample(num_timesteps=200, random_actions=False)
    finally:
        runner.stop()
    return episodes


@pytest.mark.parametrize(("kind", "num_envs"), [("single", 1), ("vector", 2)])
def test_the_runner_samples_from_its_server_what_rllibs_own_samples_in_process(
    kind: str, num_envs: int
) -> None:
    theirs = sampled(ppo(num_envs), SingleAgentEnvRunner)
    with serving("serve_env", "CartPole-v1", kind, num_envs) as address:
        ours = sampled(configure(ppo(num_envs), address, inference="torch"), RLMeshEnvRunner)

    assert len(ours) == len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(mine.get_observations(), other.get_observations())
        np.testing.assert_array_equal(mine.get_actions(), other.get_actions())
        np.testing.assert_array_equal(mine.get_rewards(), other.get_rewards())
        assert (mine.is_terminated, mine.is_truncated) == (other.is_terminated, other.is_truncated)


def test_the_runner_samples_whole_episodes_from_lanes_that_do_not_reset_themselves(
    tmp_path: Path,
) -> None:
    with serving("serve_env", "CartPole-v1", "lanes", 3, f"unix://{tmp_path}/socket") as address:
        episodes = sampled(configure(ppo(3), address), RLMeshEnvRunner)

    assert sum(episode.is_done for episode in episodes) > 4
    for episode in episodes:
        observations, ends = _replayed(episode)
        np.testing.assert_allclose(episode.get_observations(), observations, atol=1e-4)
        assert ends[:-1] == [False] * (len(episode) - 1)
        assert ends[-1] == episode.is_terminated


def _replayed(episode: SingleAgentEpisode) -> tuple[list[Any], list[bool]]:
    """Play an episode of CartPole again from its first observation."""
    env = gymnasium.make("CartPole-v1").unwrapped
    assert isinstance(env, CartPoleEnv)
    env.reset()
    env.state = episode.get_observations(0)
    observations, ends = [episode.get_observations(0)], []
    for action in episode.get_actions():
        observation, _, terminated, _, _ = env.step(int(action))
        observations.append(observation)
        ends.append(terminated)
    return observations, ends


@pytest.mark.parametrize(("kind", "num_envs"), [("single", 1), ("vector", 2), ("lanes", 2)])
def test_a_server_of_its_that_dies_and_comes_back_costs_no_transition(
    kind: str, num_envs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(LOG_VARIABLE, str(log))
    steps = Steps(log)
    config = PPOConfig().env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    with serving("serve_env", STAIRS, kind, num_envs) as address:
        runner = RLMeshEnvRunner(config=configure(config, address), worker_index=0, num_workers=0)
        before = runner.sample(num_timesteps=8)
        during = Background(lambda: runner.sample(num_timesteps=40 * num_envs))
        steps.wait_for(20 * num_envs)  # in the midst of an episode, and of the rollout
    with serving("serve_env", STAIRS, kind, num_envs, address):
        episodes = before + during.result() + runner.sample(num_timesteps=8)
        runner.stop()

    assert_unbroken(episodes)
    cut = [each for each in episodes if each.is_truncated]
    assert len(cut) == num_envs
    assert all(INTERRUPTED_KEY in each.get_infos(-1) for each in cut)
    assert sum(map(len, episodes)) >= 8 + 40 * num_envs + 8
    assert sum(each.is_terminated for each in episodes) > 4 * num_envs


def test_the_command_line_trains_on_its_server(tmp_path: Path) -> None:
    with serving("serve_env", "CartPole-v1", "vector", 4) as address:
        done = subprocess.run(
            [
                sys.executable, "-m", "rlmesh_ray", "train", address, "--json", "--seed", "1",
                "--stop-iters", "1", "--checkpoint-dir", str(tmp_path / "run"),
            ],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    assert done.returncode == 0, done.stderr
    reported = [json.loads(line) for line in done.stdout.splitlines()]
    assert reported, "every iteration is reported"
    assert (tmp_path / "run" / "checkpoint").exists()
