"""Of episodes whose rest does not come, nothing stays with the writer."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO

from rlmesh_ray.recording import RecordOptions, load
from rlmesh_ray.recording.recorder import info_of
from rlmesh_ray.recording.rllib_episodes import SampleRecorder
from rlmesh_ray.recording.vector_steps import Abandoned, Message, Stream
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium

OBSERVATIONS: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (2,))
ACTIONS: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
SPACES = from_gymnasium(OBSERVATIONS), from_gymnasium(ACTIONS)
RUNNER = SimpleNamespace(num_envs=2, worker_index=0, config=SimpleNamespace(in_evaluation=False))


class WriterInThisProcess:
    """Takes the place of ``WriterHandle``."""

    def __init__(self, options: RecordOptions) -> None:
        self.writer = EpisodeWriter(options.folder, options.max_gb)
        self.is_full = False
        self.num_lost = 0

    def new_stream(self, contract: EnvContract, endpoint: str) -> str:
        self.writer.handle("0", Stream(info_of(contract), endpoint, "none"))
        return "0"

    def put(self, key: str, message: Message, num_bytes: int) -> bool:
        if not self.is_full:
            self.writer.handle(key, message)
        return not self.is_full

    def abandon(self, key: str, episode: str) -> None:
        self.writer.handle(key, Abandoned(episode))

    def lose(self, num_episodes: int) -> None:
        self.num_lost += num_episodes

    def close(self, timeout_s: float) -> None:
        self.writer.close()


@pytest.fixture(name="writers")
def _writers() -> list[WriterInThisProcess]:
    return []


@pytest.fixture(name="record")
def _record(tmp_path: Path, writers: list[WriterInThisProcess]) -> Callable[..., None]:
    def new_writer(options: RecordOptions) -> Any:
        writers.append(WriterInThisProcess(options))
        return writers[-1]

    contract = EnvContract("Toy-v0", *SPACES, 2, AutoresetMode.NEXT_STEP)
    recorder = SampleRecorder(RecordOptions(tmp_path), contract, 1, new_writer)
    return lambda *chunks: recorder(env_runner=RUNNER, samples=chunks)


def begun(name: str) -> SingleAgentEpisode:
    episode = SingleAgentEpisode(name, observation_space=OBSERVATIONS, action_space=ACTIONS)
    episode.add_env_reset(np.zeros(2, np.float32), {})
    return stepped(episode)


def stepped(episode: SingleAgentEpisode, *, ends: bool = False) -> SingleAgentEpisode:
    observation, outputs = np.ones(2, np.float32), {WEIGHTS_SEQ_NO: 0}
    episode.add_env_step(observation, 1, 1.0, {}, terminated=ends, extra_model_outputs=outputs)
    return episode


def num_open(folder: Path) -> int:
    return len(list((folder / "episodes").glob("*.tmp")))


def test_an_episode_of_which_a_chunk_is_dropped_is_deleted(
    tmp_path: Path, record: Callable[..., None], writers: list[WriterInThisProcess]
) -> None:
    one, other = begun("one"), begun("other")
    record(one, other)
    (writer,) = writers
    assert num_open(tmp_path) == 2

    writer.is_full = True
    one = stepped(one.cut())
    record(one)
    assert (num_open(tmp_path), writer.num_lost) == (1, 1)

    writer.is_full = False
    record(stepped(one.cut(), ends=True), stepped(other.cut(), ends=True))
    writer.close(0.0)
    assert [summary.length for summary in load(tmp_path).episodes] == [2]


def test_episodes_that_a_runner_gives_up_are_deleted_once_its_lanes_have_others(
    tmp_path: Path, record: Callable[..., None], writers: list[WriterInThisProcess]
) -> None:
    for number in range(5):
        lanes = begun(f"{number}a"), begun(f"{number}b")
        record(*lanes)
        assert num_open(tmp_path) == 2

    record(*(stepped(lane.cut(), ends=True) for lane in lanes))
    writers[0].close(0.0)
    assert [summary.length for summary in load(tmp_path).episodes] == [2, 2]
