"""Trainings are recorded as they sample, and RLlib trains on what was recorded."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray import EnvServer, ModelServer, evaluate
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.models.loading import load_policy
from rlmesh_ray.recording import RecordOptions, load, offline_data, record_episodes
from rlmesh_ray.rllib import RLMeshEnvRunner, configure
from rlmesh_ray.rllib.training import train

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(name="cart_poles_address", scope="module")
def _cart_poles_address() -> Iterator[str]:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server.address


def ppo(address: str, **settings: Any) -> Any:
    config = PPOConfig().env_runners(num_env_runners=0, rollout_fragment_length=40, **settings)
    return configure(config, address)


def has_lines(index: Path, least: int) -> bool:
    return index.exists() and index.read_bytes().count(b"\n") >= least


@pytest.mark.parametrize("fast_path", [True, False])
def test_episodes_are_recorded_whole_though_samples_hold_parts_of_them(
    cart_poles_address: str, tmp_path: Path, fast_path: bool
) -> None:
    config = configure(
        PPOConfig().env_runners(num_env_runners=0, rollout_fragment_length=7),
        cart_poles_address,
        fast_path=fast_path,
    )
    runner = RLMeshEnvRunner(
        config=record_episodes(config, tmp_path), worker_index=0, num_workers=0
    )
    parts: dict[str, list[SingleAgentEpisode]] = {}
    try:
        while sum(chunks[-1].is_done for chunks in parts.values()) < 4:
            for chunk in runner.sample():
                parts.setdefault(chunk.id_, []).append(chunk)
    finally:
        runner.stop()

    assert (runner.fast_path_disabled_reason is None) == fast_path
    assert has_lines(tmp_path / "index.jsonl", 4)  # with the runner the recording has ended
    recording = load(tmp_path)
    sampled = [chunks for chunks in parts.values() if chunks[-1].is_done]
    for summary in recording.episodes:
        episode = recording.episode(summary.id)
        chunks = next(
            chunks
            for chunks in sampled
            if np.array_equal(chunks[0].get_observations(0), episode.observations[0])
        )
        actions = np.concatenate([chunk.get_actions() for chunk in chunks])
        assert len(chunks) > 1
        np.testing.assert_array_equal(episode.actions, actions)
        assert summary.terminated == chunks[-1].is_terminated
        assert summary.policy_version == 0


def test_every_nth_episode_of_training_is_recorded_and_all_of_evaluation(
    cart_poles_address: str, tmp_path: Path
) -> None:
    folders = {}
    for name, in_evaluation in (("training", False), ("evaluation", True)):
        folders[name] = tmp_path / name
        config = ppo(cart_poles_address, batch_mode="complete_episodes")
        record_episodes(config, folders[name], every=3)
        config.in_evaluation = in_evaluation
        runner = RLMeshEnvRunner(config=config, worker_index=0, num_workers=0)
        try:
            runner.sample(num_episodes=7)
        finally:
            runner.stop()

    for name, num_episodes in (("training", 3), ("evaluation", 7)):
        assert len(load(folders[name]).episodes) == num_episodes


@pytest.mark.parametrize("connector", [MeanStdFilter, FlattenObservations])
def test_observations_are_recorded_as_connectors_leave_them(
    cart_poles_address: str, tmp_path: Path, connector: Callable[..., Any]
) -> None:
    config = ppo(
        cart_poles_address,
        batch_mode="complete_episodes",
        env_to_module_connector=lambda *_, **__: connector(),
    )
    runner = RLMeshEnvRunner(
        config=record_episodes(config, tmp_path), worker_index=0, num_workers=0
    )
    try:
        sampled = runner.sample(num_episodes=2)
    finally:
        runner.stop()

    recorded = load(tmp_path)
    assert recorded.observation_space == sampled[0].observation_space
    found = [recorded.episode(each.id).observations for each in recorded.episodes]
    assert len(found) == len(sampled)
    for episode in sampled:
        assert any(np.array_equal(each, episode.get_observations()) for each in found)


def test_a_folder_of_another_environment_is_refused_whatever_connectors_change(
    cart_poles_address: str, tmp_path: Path
) -> None:
    with EnvServer("MountainCar-v0") as server:
        record_episodes(ppo(server.address), tmp_path)
    config = ppo(cart_poles_address, env_to_module_connector=lambda *_, **__: MeanStdFilter())

    with pytest.raises(ConfigurationError, match="has episodes of MountainCar-v0"):
        record_episodes(config, tmp_path)


def test_frames_of_render_are_no_part_of_a_training(
    cart_poles_address: str, tmp_path: Path
) -> None:
    options = RecordOptions(tmp_path, video="render")
    with pytest.raises(ConfigurationError, match="record at the endpoint"):
        record_episodes(ppo(cart_poles_address), options)


def test_a_config_without_endpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"comes after rlmesh_ray\.rllib\.configure"):
        record_episodes(PPOConfig(), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bc_learns_from_the_recording_of_a_trained_policy(tmp_path: Path) -> None:
    with EnvServer("CartPole-v1", num_envs=16) as server:
        config = PPOConfig().env_runners(num_env_runners=0)
        config.training(
            train_batch_size_per_learner=2048, minibatch_size=256, num_epochs=6, lr=1e-3
        )
        checkpoint = tmp_path / "ppo"
        progress = train(
            configure(config, server.address),
            stop_return=475.0,
            stop_iters=60,
            checkpoint_dir=checkpoint,
        )
        assert list(progress)[-1].return_mean >= 475
        with ModelServer(load_policy(str(checkpoint))) as model:
            shown = evaluate(
                server.address, model.address, episodes=32, seed=1, record=tmp_path / "recording"
            )
        assert shown.return_mean > 450

        bc = offline_data(BCConfig(), load(tmp_path / "recording"))
        bc.training(train_batch_size_per_learner=1024, lr=1e-3)
        bc.offline_data(dataset_num_iters_per_learner=20, map_batches_kwargs={"concurrency": 1})
        learner = bc.build_algo()
        return_mean = 0.0
        try:
            for number in range(10):
                for _ in range(4):
                    learner.train()
                learner.save_to_path(str(tmp_path / f"bc-{number}"))
                with ModelServer(load_policy(str(tmp_path / f"bc-{number}"))) as model:
                    learned = evaluate(server.address, model.address, episodes=32, seed=500)
                return_mean = learned.return_mean
                if return_mean >= 450:
                    break
        finally:
            learner.stop()

    assert return_mean >= 450
