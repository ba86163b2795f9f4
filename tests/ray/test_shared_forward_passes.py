"""Slots that wait at the same time share one forward pass."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.numpy import softmax

from rlmesh_ray import EnvServer
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.runner.fast_path import ActionBatch, ArrayPipeline

pytestmark = pytest.mark.usefixtures("local_ray")

WIDTH = 2
BuildRunner = Callable[[int], RLMeshEnvRunner]


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=WIDTH) as server:
        yield server


@pytest.fixture
def runner_with(server: EnvServer) -> Iterator[BuildRunner]:
    opened: list[Any] = []

    def build(num_sessions: int) -> RLMeshEnvRunner:
        config = PPOConfig().environment("CartPole-v1")
        config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_sessions * WIDTH)
        configure(config, server.address)
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        opened.append(runner)
        return runner

    yield build
    for each in reversed(opened):
        each.stop()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each forward pass has had."""
    seen: list[int] = []
    choose = ArrayPipeline.choose

    def spy(self: ArrayPipeline, observations: Any, sampled: int) -> ActionBatch:
        seen.append(len(observations))
        return choose(self, observations, sampled)

    monkeypatch.setattr(ArrayPipeline, "choose", spy)
    return seen


def assert_each_action_is_its_observations_own(
    runner: RLMeshEnvRunner, episodes: Sequence[SingleAgentEpisode]
) -> None:
    for episode in episodes:
        observations = np.asarray(episode.get_observations())[: len(episode)]
        with torch.no_grad():
            output = runner.module._forward({Columns.OBS: torch.from_numpy(observations)})
        logits = np.asarray(output[Columns.ACTION_DIST_INPUTS])
        reported = {
            name: np.asarray(episode.get_extra_model_outputs(name))
            for name in (Columns.ACTION_DIST_INPUTS, Columns.ACTION_LOGP)
        }
        np.testing.assert_allclose(reported[Columns.ACTION_DIST_INPUTS], logits, atol=1e-5)
        actions = np.asarray(episode.get_actions())
        chances = softmax(logits)[np.arange(len(episode)), actions]
        np.testing.assert_allclose(reported[Columns.ACTION_LOGP], np.log(chances), atol=1e-4)


def test_slots_that_wait_together_share_a_pass_and_leave_half_of_them_to_step(
    runner_with: BuildRunner, rows: list[int]
) -> None:
    runner = runner_with(6)

    runner.sample(num_timesteps=1)
    runner.sample(num_timesteps=6 * WIDTH)

    # At the beginning of a call all of them wait. The first one asked for one slot only.
    assert rows[:3] == [WIDTH, 3 * WIDTH, 3 * WIDTH]
    assert max(rows) == 3 * WIDTH


@pytest.mark.parametrize("num_sessions", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_few_slots_take_turns(runner_with: BuildRunner, rows: list[int], num_sessions: int) -> None:
    runner_with(num_sessions).sample(num_timesteps=200)

    assert set(rows) == {WIDTH}


def test_every_lane_gets_the_action_that_was_chosen_for_it(
    runner_with: BuildRunner, rows: list[int]
) -> None:
    runner = runner_with(6)

    episodes = runner.sample(num_timesteps=600)

    assert max(rows) == 3 * WIDTH
    assert 600 <= sum(map(len, episodes)) < 600 + WIDTH
    assert_each_action_is_its_observations_own(runner, episodes)


def test_whole_episodes_are_as_many_as_were_asked_for(runner_with: BuildRunner) -> None:
    runner = runner_with(6)

    episodes = runner.sample(num_episodes=20)

    assert len(episodes) == 20
    assert all(episode.is_done for episode in episodes)
    assert_each_action_is_its_observations_own(runner, episodes)


def test_a_module_that_gives_no_rows_is_asked_for_each_slot_by_itself(
    runner_with: BuildRunner, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The output cannot be split into rows of slots.
    monkeypatch.setattr(ActionBatch, "split", lambda self, widths: None)
    runner = runner_with(4)

    episodes = runner.sample(num_timesteps=100)

    assert {WIDTH, 2 * WIDTH} <= set(rows)
    assert_each_action_is_its_observations_own(runner, episodes)


@pytest.mark.parametrize("num_sessions", [2, pytest.param(6, marks=pytest.mark.nightly)])
def test_the_per_item_path_takes_over_when_the_module_s_output_changes(
    runner_with: BuildRunner, monkeypatch: pytest.MonkeyPatch, num_sessions: int
) -> None:
    choose, num_chosen = ArrayPipeline.choose, 0

    def changing(self: ArrayPipeline, observations: Any, sampled: int) -> ActionBatch:
        nonlocal num_chosen
        num_chosen += 1
        choice = choose(self, observations, sampled)
        if num_chosen > 2 * num_sessions:  # while other slots are being stepped
            logits = choice.extras[Columns.ACTION_DIST_INPUTS]
            choice.extras[Columns.ACTION_DIST_INPUTS] = logits.astype(np.float64)
        return choice

    monkeypatch.setattr(ArrayPipeline, "choose", changing)
    runner = runner_with(num_sessions)

    episodes = runner.sample(num_timesteps=200)

    assert runner.fast_path_disabled_reason is not None
    assert 200 <= sum(map(len, episodes)) < 200 + WIDTH
    assert_each_action_is_its_observations_own(runner, episodes)
