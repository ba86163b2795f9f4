"""offline_data(output=...): what runners sample from endpoints is recorded as RLlib would."""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow.parquet
import pytest
import ray
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from rlmesh_ray import EnvServer
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.rllib import (
    RLMeshEnvRunner,
    RLMeshRLlinkEnvRunner,
    configure,
    configure_rllink,
)
from tests.ray.multi_agent_worlds import Climb
from tests.ray.rllink_simulators import Simulators, local

pytestmark = pytest.mark.usefixtures("local_ray")


class Watching(RLlibCallback):
    """Turns the fast path off."""

    def on_episode_step(self, **_kwargs: Any) -> None:
        pass


@pytest.fixture(scope="module")
def cart_poles() -> Iterator[EnvServer]:
    with EnvServer("CartPole-v1", num_envs=2) as server:
        yield server


@pytest.fixture
def runner(cart_poles: EnvServer, tmp_path: Path) -> Iterator[Callable[..., RLMeshEnvRunner]]:
    """Build a local runner that records below ``tmp_path``."""
    made: list[RLMeshEnvRunner] = []

    def make(config: PPOConfig | None = None, **settings: Any) -> RLMeshEnvRunner:
        config = config or PPOConfig()
        config.env_runners(num_env_runners=0)
        config.offline_data(**{"output": str(tmp_path), "output_compress_columns": [], **settings})
        config = configure(config, cart_poles.address)
        made.append(RLMeshEnvRunner(config=config, worker_index=0, num_workers=0))
        return made[-1]

    yield make
    for each in made:
        each.stop()


def files(output: Path) -> list[Path]:
    """All that was written, in the order of writing."""
    return sorted(output.rglob("*.parquet"), key=lambda path: path.parent.name)


def rows(output: Path) -> list[dict[str, Any]]:
    return [row for path in files(output) for row in pyarrow.parquet.read_table(path).to_pylist()]


def assert_rows_are_steps(
    recorded: Sequence[dict[str, Any]], episodes: Sequence[SingleAgentEpisode]
) -> None:
    assert len(recorded) == sum(map(len, episodes))
    left = list(recorded)
    for episode in episodes:
        own, left = left[: len(episode)], left[len(episode) :]
        assert {row["eps_id"] for row in own} == {episode.id_}
        for name, expected in (
            ("obs", episode.get_observations()[:-1]),
            ("new_obs", episode.get_observations()[1:]),
            ("actions", episode.get_actions()),
            ("rewards", episode.get_rewards()),
            ("action_logp", episode.get_extra_model_outputs("action_logp")),
        ):
            np.testing.assert_array_equal([row[name] for row in own], np.asarray(expected))
        assert [row["terminateds"] for row in own[:-1]] == [False] * (len(own) - 1)
        assert own[-1]["terminateds"] == episode.is_terminated
        assert own[-1]["truncateds"] == episode.is_truncated


@pytest.mark.parametrize("callbacks", [RLlibCallback, Watching])
def test_every_step_is_recorded_once(
    runner: Callable[..., RLMeshEnvRunner], tmp_path: Path, callbacks: type[RLlibCallback]
) -> None:
    recorder = runner(PPOConfig().callbacks(callbacks), output_write_episodes=False)

    episodes = [one for _ in range(2) for one in recorder.sample(num_timesteps=40)]

    assert (recorder.fast_path_disabled_reason is None) == (callbacks is RLlibCallback)
    assert all(episode.is_numpy for episode in episodes)
    assert [path.parent.relative_to(tmp_path).as_posix() for path in files(tmp_path)] == [
        "endpoints/run-000000-00001",
        "endpoints/run-000000-00002",
    ]
    assert_rows_are_steps(rows(tmp_path), episodes)


def test_files_have_as_many_rows_as_they_may_and_the_rest_follows_at_the_end(
    runner: Callable[..., RLMeshEnvRunner], tmp_path: Path
) -> None:
    recorder = runner(
        output_write_episodes=False, output_max_rows_per_file=25, output_write_remaining_data=True
    )

    episodes = recorder.sample(num_timesteps=60)
    recorded = [len(pyarrow.parquet.read_table(path)) for path in files(tmp_path)]
    recorder.stop()

    assert recorded == [25, 25]
    num_left = sum(map(len, episodes)) - 50
    assert recorder.get_metrics()["recording_buffer_size"].peek() == num_left
    assert_rows_are_steps(rows(tmp_path), episodes)


def test_whole_episodes_come_back_as_they_were(
    runner: Callable[..., RLMeshEnvRunner], tmp_path: Path
) -> None:
    recorder = runner(PPOConfig().env_runners(batch_mode="complete_episodes"))

    episodes = recorder.sample(num_episodes=3)

    assert recorder.fast_path_disabled_reason is None
    states = [
        msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode) for row in rows(tmp_path)
    ]
    read = [SingleAgentEpisode.from_state(state) for state in states]
    assert [one.id_ for one in read] == [one.id_ for one in episodes]
    for mine, theirs in zip(read, episodes, strict=True):
        np.testing.assert_array_equal(mine.get_observations(), theirs.get_observations())
        np.testing.assert_array_equal(mine.get_actions(), theirs.get_actions())
        assert (mine.is_terminated, mine.is_truncated) == (
            theirs.is_terminated,
            theirs.is_truncated,
        )


def test_rows_that_cannot_be_written_are_kept_and_tried_again(
    runner: Callable[..., RLMeshEnvRunner], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "in_the_way"
    output.write_text("a file where a directory is to be")
    recorder = runner(output=str(output), output_write_episodes=False)

    with caplog.at_level(logging.ERROR, "rlmesh_ray"):
        episodes = recorder.sample(num_timesteps=10)
    num_rows = sum(map(len, episodes))
    assert f"cannot write {num_rows} rows to {output}/endpoints" in caplog.text
    output.unlink()
    episodes += recorder.sample(num_timesteps=10)

    assert_rows_are_steps(rows(output), episodes)


def test_what_simulators_send_is_recorded(tmp_path: Path) -> None:
    env = gymnasium.make("CartPole-v1")
    config = PPOConfig().env_runners(num_env_runners=0, rollout_fragment_length=40)
    config.offline_data(
        output=str(tmp_path), output_write_episodes=False, output_compress_columns=[]
    )
    config = configure_rllink(
        config,
        observation_space=env.observation_space,
        action_space=env.action_space,
        address="127.0.0.1:0",
    )
    recorder, simulators = RLMeshRLlinkEnvRunner(config=config, worker_index=0), Simulators()
    try:
        simulators.start(recorder.address, local)
        episodes = recorder.sample()
    finally:
        recorder.stop()
        simulators.stop()

    assert_rows_are_steps(rows(tmp_path), episodes)


def test_a_runner_that_was_made_without_output_records_nothing(
    runner: Callable[..., RLMeshEnvRunner], tmp_path: Path
) -> None:
    recorder = runner(output=None)

    recorder.sample(num_timesteps=10)

    assert not files(tmp_path)
    assert "recording_buffer_size" not in recorder.get_metrics()


def test_recording_leaves_the_process_its_share_of_the_cluster(
    runner: Callable[..., RLMeshEnvRunner],
) -> None:
    options = ray.data.DataContext.get_current().execution_options
    limits = options.resource_limits

    runner(output_write_episodes=False)

    assert options.resource_limits == limits


def test_output_that_cannot_be_honoured_is_refused_by_configure(cart_poles: EnvServer) -> None:
    with pytest.raises(ConfigurationError, match="such as 'write_parquet'"):
        configure(
            PPOConfig().offline_data(output="/data", output_write_method="x"), cart_poles.address
        )


def test_several_agents_are_not_recorded() -> None:
    config = PPOConfig().env_runners(num_env_runners=0).offline_data(output="/data")
    config.multi_agent(policies={"p"}, policy_mapping_fn=lambda *_args, **_kwargs: "p")

    with (
        EnvServer(Climb) as server,
        pytest.raises(ConfigurationError, match="one agent, as in RLlib"),
    ):
        configure(config, server.address)


def count_returned(*, samples: Any, metrics_logger: Any, **_kwargs: Any) -> None:
    # RLlib also counts the steps of episodes that were running when enough had ended.
    metrics_logger.log_value("num_steps_returned", sum(map(len, samples)), reduce="sum")


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("writes_episodes", [False, True])
def test_bc_trains_on_what_was_recorded(
    cart_poles: EnvServer, tmp_path: Path, writes_episodes: bool
) -> None:
    config = PPOConfig().env_runners(num_env_runners=1, batch_mode="complete_episodes")
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    config.callbacks(on_sample_end=count_returned)
    config.offline_data(output=str(tmp_path), output_write_episodes=writes_episodes)
    recorder = configure(config, cart_poles.address).build_algo()
    try:
        results = [recorder.train()["env_runners"] for _ in range(2)]
    finally:
        recorder.stop()
    num_steps = sum(int(result["num_steps_returned"]) for result in results)
    num_episodes = sum(int(result["num_episodes"]) for result in results)

    recorded = rows(tmp_path)
    assert len(recorded) == (num_episodes if writes_episodes else num_steps)
    if not writes_episodes:
        assert len(Counter(row["eps_id"] for row in recorded)) == num_episodes

    bc = BCConfig().environment(
        observation_space=config.observation_space, action_space=config.action_space
    )
    bc.training(train_batch_size_per_learner=num_steps // 2)
    bc.offline_data(
        input_=[str(tmp_path)],
        input_read_episodes=writes_episodes,
        input_read_batch_size=num_episodes if writes_episodes else None,
        dataset_num_iters_per_learner=1,
        map_batches_kwargs={"concurrency": 1},
    )
    learner = bc.build_algo()
    try:
        learned = learner.train()["learners"]["default_policy"]
        # What the learner's connectors make of it: one row a step, unless it draws from episodes.
        num_read = None if writes_episodes else learner.offline_data.data.count()
    finally:
        learner.stop()

    assert num_read in (None, len(recorded))
    assert learned["num_module_steps_trained"] > 0
    assert np.isfinite(learned["policy_loss"])
