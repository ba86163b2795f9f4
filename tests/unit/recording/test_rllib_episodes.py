"""What is recorded of RLlib's episodes, and which rows its offline API gets of a recording."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.connectors.module_to_env import NormalizeAndClipActions
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics import WEIGHTS_SEQ_NO
from ray.rllib.utils.spaces.space_utils import unsquash_action

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import RecordOptions, load, offline_data
from rlmesh_ray.recording.recorder import Message, Segment, Stream, info_of
from rlmesh_ray.recording.rllib_episodes import SampleRecorder
from rlmesh_ray.recording.store import RecordingInfo
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from rlmesh_ray.spaces.gym_conversion import from_gymnasium
from tests.unit.recording.recordings import POLE, cart_pole, written

OBSERVATIONS: gymnasium.Space[Any] = gymnasium.spaces.Box(-1, 1, (2,))
ACTIONS: gymnasium.Space[Any] = gymnasium.spaces.Discrete(2)
SPACES = from_gymnasium(OBSERVATIONS), from_gymnasium(ACTIONS)


def runner_of(normalizes: bool | None = True, clips: bool = False, **attributes: Any) -> Any:
    """Return what a recorder asks of an env runner; None: its pipeline leaves actions alone."""
    piece = NormalizeAndClipActions(normalize_actions=bool(normalizes), clip_actions=clips)
    pipeline = SimpleNamespace(connectors=[] if normalizes is None else [piece])
    return SimpleNamespace(
        num_envs=2,
        worker_index=0,
        config=BCConfig(),
        _module_to_env=pipeline,
        **attributes,
    )


LEVER = gymnasium.spaces.Box(np.array([-2, 0, 5], np.float32), np.array([2, 10, 5], np.float32))


class WriterInThisProcess:
    """Takes the place of ``WriterHandle``."""

    def __init__(self, options: RecordOptions) -> None:
        self.writer = EpisodeWriter(options.folder, options.max_gb)
        self.is_full = False
        self.num_lost = 0

    def new_stream(self, contract: EnvContract, endpoint: str) -> str:
        self.writer.handle("0", Stream(info_of(contract), endpoint, "none"))
        return "0"

    def put(self, key: str, message: Message, num_bytes: int = 0) -> bool:
        if num_bytes and self.is_full:
            return False
        self.writer.handle(key, message)
        return True

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
    return lambda *chunks: recorder(env_runner=runner_of(), samples=chunks)


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


def test_a_sample_of_random_actions_holds_the_environments_already() -> None:
    episode = SingleAgentEpisode("a", observation_space=OBSERVATIONS, action_space=LEVER)
    episode.add_env_reset(np.zeros(2, np.float32), {})
    episode.add_env_step(
        np.ones(2, np.float32),
        np.array([1, 3, 5], np.float32),
        1.0,
        {"note": "x" * 5000},
        extra_model_outputs={WEIGHTS_SEQ_NO: 0},
    )
    put = []

    def noted(key: str, segment: Segment, num_bytes: int) -> bool:
        put.append((segment, num_bytes))
        return True

    contract = EnvContract("Toy-v0", SPACES[0], from_gymnasium(LEVER), 2, AutoresetMode.NEXT_STEP)
    writer: Any = SimpleNamespace(put=noted, new_stream=lambda *_: "0", close=lambda _: None)
    recorder = SampleRecorder(RecordOptions("unused"), contract, 1, lambda _: writer)
    call = SimpleNamespace(random_actions=True)
    runner = runner_of(sampling=SimpleNamespace(call=call))
    recorder(env_runner=runner, samples=[episode])
    recorder.close()

    ((segment, num_bytes),) = put
    np.testing.assert_array_equal(segment.columns[1][1], [1, 3, 5])
    assert num_bytes > 5000


@pytest.mark.parametrize(
    ("runner", "actions"),
    [
        (runner_of(), [[1, 10, 5], [-2, 5, 5]]),
        (runner_of(normalizes=False, clips=True), [[0.5, 3, 5], [-2, 0, 5]]),
        (runner_of(normalizes=False), [[0.5, 3, 0], [-7, 0, 0]]),
        (runner_of(normalizes=None), [[0.5, 3, 0], [-7, 0, 0]]),
    ],
    ids=["normalized", "clipped", "neither", "no connector"],
)
def test_actions_of_a_training_are_recorded_as_the_environment_gets_them(
    tmp_path: Path, runner: Any, actions: list[list[float]]
) -> None:
    contract = EnvContract("Toy-v0", SPACES[0], from_gymnasium(LEVER), 2, AutoresetMode.NEXT_STEP)
    writer: Any = WriterInThisProcess(RecordOptions(tmp_path))
    recorder = SampleRecorder(RecordOptions(tmp_path), contract, 1, lambda _: writer)
    episode = SingleAgentEpisode("a", observation_space=OBSERVATIONS, action_space=LEVER)
    episode.add_env_reset(np.zeros(2, np.float32), {})
    for action in ([0.5, 3, 0], [-7, 0, 0]):
        episode.add_env_step(
            np.ones(2, np.float32),
            np.array(action, np.float32),
            1.0,
            {},
            terminated=action[0] < 0,
            extra_model_outputs={WEIGHTS_SEQ_NO: 0},
        )

    recorder(env_runner=runner, samples=[episode])
    recorder.close()

    recording = load(tmp_path)
    np.testing.assert_array_equal(recording.episode("000001").actions, actions)


def test_an_action_without_an_axis_is_recorded_as_a_number(tmp_path: Path) -> None:
    number = gymnasium.spaces.Box(-2, 6, ())
    contract = EnvContract("Toy-v0", SPACES[0], from_gymnasium(number), 1, AutoresetMode.DISABLED)
    writer: Any = WriterInThisProcess(RecordOptions(tmp_path))
    recorder = SampleRecorder(RecordOptions(tmp_path), contract, 1, lambda _: writer)
    episode = SingleAgentEpisode("a", observation_space=OBSERVATIONS, action_space=number)
    episode.add_env_reset(np.zeros(2, np.float32), {})
    episode.add_env_step(
        np.ones(2, np.float32),
        np.array([0.5], np.float32),  # as RLlib's modules give it
        1.0,
        {},
        terminated=True,
        extra_model_outputs={WEIGHTS_SEQ_NO: 0},
    )

    recorder(env_runner=runner_of(), samples=[episode])
    recorder.close()

    np.testing.assert_array_equal(load(tmp_path).episode("000001").actions, [4.0])


def recorded(folder: Path, space: gymnasium.Space[Any], actions: Any) -> None:
    steps = cart_pole(len(actions), seed=1)
    first = np.zeros_like(actions[:1])
    columns = [steps.columns[0], np.concatenate([first, actions]), *steps.columns[2:]]
    info = RecordingInfo("Toy-v0", POLE, from_gymnasium(space), 50.0)
    written(folder, info, Segment("a", columns, steps.infos, begins=True, ends=True))


def rows(config: BCConfig, folder: Path) -> Any:
    (path,) = offline_data(config, load(folder)).input_
    column = pq.read_table(path)[Columns.ACTIONS].combine_chunks()
    return np.array(column.to_pylist())


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # of Ray Data
@pytest.mark.parametrize(
    "space",
    [
        LEVER,
        gymnasium.spaces.Box(np.array([-1.0, 3.0]), np.array([7.0, 4.0]), dtype=np.float64),
        gymnasium.spaces.Box(2, 9, (2,), np.int64),
        gymnasium.spaces.Box(-np.inf, np.inf, (2,)),
        gymnasium.spaces.Box(-2, 6, ()),
        gymnasium.spaces.Discrete(5),
        gymnasium.spaces.MultiDiscrete([3, 4]),
    ],
    ids=str,
)
def test_rows_for_rllib_have_the_actions_that_its_module_would_choose(
    tmp_path: Path, space: gymnasium.Space[Any]
) -> None:
    space.seed(1)
    actions = np.array([space.sample() for _ in range(20)])
    recorded(tmp_path, space, actions)

    chosen = rows(BCConfig(), tmp_path)
    if isinstance(space, gymnasium.spaces.Box):
        actions = actions.reshape(20, -1)  # learners know no Box of shape ()
    np.testing.assert_allclose(unsquash_action(chosen, space), actions, rtol=1e-6, atol=1e-6)
    if isinstance(space, gymnasium.spaces.Box) and np.isfinite(space.low).all():
        assert chosen.min() >= (0 if space.dtype == np.int64 else -1)
    np.testing.assert_array_equal(
        rows(BCConfig().environment(normalize_actions=False), tmp_path), actions
    )


@pytest.mark.filterwarnings("ignore:.* is deprecated:DeprecationWarning")  # of Ray Data
def test_rows_that_a_training_reads_are_changed_by_no_other_scale_and_no_failure(
    tmp_path: Path,
) -> None:
    for number in range(1, 4):
        recorded(tmp_path, LEVER, np.full((number, 3), 5, np.float32))
    (path,) = offline_data(BCConfig(), load(tmp_path)).input_
    read = Path(path).read_bytes()

    (other,) = offline_data(BCConfig().environment(normalize_actions=False), load(tmp_path)).input_
    assert (other != path, Path(path).read_bytes() == read) == (True, True)

    (tmp_path / "episodes" / "000003.parquet").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match=r"episode 000003 .* cannot be read"):
        offline_data(BCConfig(), load(tmp_path))
    assert Path(path).read_bytes() == read
    assert {str(each) for each in (tmp_path / "rllib").iterdir()} == {path, other}


def test_rows_are_replaced_while_a_training_reads_the_former_ones(tmp_path: Path) -> None:
    recorded(tmp_path, LEVER, np.full((1, 3), 5, np.float32))
    (path,) = offline_data(BCConfig(), load(tmp_path)).input_
    with open(path, "rb") as reading:
        former = reading.read()
        recorded(tmp_path, LEVER, np.full((2, 3), 5, np.float32))

        assert offline_data(BCConfig(), load(tmp_path)).input_ == [path]

        reading.seek(0)
        assert reading.read() == former
    assert pq.read_metadata(path).num_rows == 3


def test_actions_that_rllib_would_number_otherwise_are_no_rows(tmp_path: Path) -> None:
    recorded(tmp_path, gymnasium.spaces.Discrete(3, start=2), np.array([2, 4, 3]))
    with pytest.raises(ConfigurationError, match="RLlib's modules number actions from 0"):
        offline_data(BCConfig(), load(tmp_path))
