"""Sessions and evaluations are recorded as they were, by a process of its own."""

import json
import os
import signal
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import gymnasium
import numpy as np
import pytest

from rlmesh_ray import EnvServer, ModelServer, RemoteVectorEnv, evaluate
from rlmesh_ray.cli.main import main
from rlmesh_ray.errors import ConfigurationError, EnvStartError
from rlmesh_ray.recording import EpisodeSummary, Recording, RecordOptions, load
from rlmesh_ray.recording.recorder import Abandoned, Stream, WriterHandle
from rlmesh_ray.recording.store import Store
from rlmesh_ray.testing.equality import assert_identical
from tests.loopback.child_processes import child_pids
from tests.loopback.eventually import WRITER_S, eventually
from tests.unit.recording.recordings import INFO, cart_pole, written

NUM_LANES = 3


class Dot(gymnasium.Env[Any, Any]):
    """A dot on a line, which ends at its right end; renders itself."""

    render_mode = "rgb_array"
    observation_space = gymnasium.spaces.Box(0.0, 31.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def __init__(self) -> None:
        self.metadata = {"render_modes": ["rgb_array"], "render_fps": 12}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(24, 28))
        return np.array([self.place], np.float32), {"start": self.place}

    def step(self, action: Any) -> Any:
        self.place = min(max(self.place + int(action) - 1, 0), 31)
        is_over = self.place == 31
        return np.array([self.place], np.float32), 1.0, is_over, False, {"place": self.place}

    def render(self) -> Any:
        picture = np.zeros((16, 32, 3), np.uint8)
        picture[:, self.place] = 255
        return picture


def draw(observation: Any) -> Any:
    """Go right, but stay in odd places every now and then."""
    place = observation[:, 0].astype(np.int64)
    return np.where(place % 2 == 1, 2, 1 + (place % 4 == 0) + (place % 4 == 2))


def loaded(folder: Path, seeds: Iterable[int]) -> Recording:
    """Return a recording, once its writer, which may outlive its endpoint, has these episodes."""

    def is_complete() -> bool:
        return (folder / "index.jsonl").exists() and set(seeds) <= set(by_seed(load(folder)))

    assert eventually(is_complete, WRITER_S)
    return load(folder)


def by_seed(recording: Recording) -> dict[int | None, EpisodeSummary]:
    return {summary.seed: summary for summary in recording.episodes}


def test_a_folder_that_cannot_be_used_is_refused_before_the_first_step(tmp_path: Path) -> None:
    Store(tmp_path / "other").require(INFO)
    (tmp_path / "file").touch()

    with EnvServer(Dot) as server:
        for name, words in (
            ("other", "has episodes of CartPole-v1"),
            ("file", "cannot be written"),
        ):
            record = tmp_path / name
            with pytest.raises(ConfigurationError, match=words):
                evaluate(server.address, draw, episodes=1, record=record)
            with pytest.raises(EnvStartError, match=words):
                EnvServer(Dot, record=record).start()
        assert server.statistics().steps == 0


def test_a_video_of_what_is_no_image_is_refused_before_anything_is_recorded(
    tmp_path: Path,
) -> None:
    options = RecordOptions(tmp_path / "new", video="front")

    with pytest.raises(EnvStartError, match="names no image of the observations"):
        EnvServer(Dot, record=options).start()
    with EnvServer(Dot) as server, pytest.raises(ConfigurationError, match="names no image"):
        evaluate(server.address, draw, episodes=1, record=options)

    assert not Path(options.folder).exists()


# The worker records, whichever way its steps come.
@pytest.mark.parametrize(
    "transport",
    [
        "shared_memory",
        pytest.param("grpc", marks=pytest.mark.nightly),
        pytest.param("tcp", marks=pytest.mark.nightly),
    ],
)
def test_an_endpoint_records_each_session_over_any_transport(
    tmp_path: Path, transport: str
) -> None:
    local = gymnasium.vector.SyncVectorEnv([Dot] * NUM_LANES)
    with (
        EnvServer(Dot, num_envs=NUM_LANES, record=tmp_path, transport=transport) as server,
        closing(RemoteVectorEnv(server.address)) as envs,
    ):
        first = envs.reset(seed=5)
        assert_identical(first, local.reset(seed=5))
        rows = [first[0]]
        for _ in range(12):
            step = envs.step(np.full(NUM_LANES, 2))
            assert_identical(step, local.step(np.full(NUM_LANES, 2)))
            rows.append(step[0])

    recording = loaded(tmp_path, range(5, 5 + NUM_LANES))
    for lane in range(NUM_LANES):
        summary = by_seed(recording)[5 + lane]
        episode = recording.episode(summary.id)
        assert summary.lane == lane
        assert summary.terminated
        assert_identical(
            episode.observations, np.array([row[lane] for row in rows[: summary.length + 1]])
        )
        assert_identical(episode.actions, np.full(summary.length, 2))
        assert episode.infos[0] == {"start": int(rows[0][lane, 0])}
        assert episode.infos[-1] == {"place": 31}
        assert summary.video is not None
        with av.open(str(summary.video)) as file:
            assert file.streams.video[0].average_rate == 12
            assert len(list(file.decode(video=0))) == summary.length + 1


class Wide(Dot):
    """Has observations that no pipe holds: its writer must be there to take them."""

    observation_space = gymnasium.spaces.Box(0, 255, (200_000,), np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        observation, info = super().reset(seed=seed, options=options)
        return np.full(200_000, observation, np.uint8), info

    def step(self, action: Any) -> Any:
        observation, *others = super().step(action)
        return np.full(200_000, observation, np.uint8), *others


def test_an_endpoint_that_stops_hands_over_a_session_that_has_just_ended(tmp_path: Path) -> None:
    with (
        EnvServer(Wide, record=tmp_path) as server,
        closing(RemoteVectorEnv(server.address)) as env,
    ):
        env.reset(seed=5)
        for _ in range(12):
            env.step(np.full(1, 2))

    assert loaded(tmp_path, [5]).episodes[0].terminated


class Unclosable(Dot):
    """Ends otherwise than it should when it is closed."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def close(self) -> None:
        if self.how == "exits":
            os._exit(1)
        raise RuntimeError("the simulator does not close")


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_an_environment_that_fails_when_it_closes_costs_no_recorded_episode(
    how: str, tmp_path: Path
) -> None:
    with EnvServer(Unclosable, env_kwargs={"how": how}, record=tmp_path) as server:
        with closing(RemoteVectorEnv(server.address)) as env:
            env.reset(seed=5)
            for _ in range(12):
                env.step(np.full(1, 2))

        assert eventually(lambda: bool(load(tmp_path).episodes), WRITER_S)


def test_the_command_records_an_evaluation_episode_by_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with EnvServer(Dot, num_envs=2) as pair, EnvServer(Dot) as single, ModelServer(draw) as model:
        arguments = ["evaluate", "--env", pair.address, "--env", single.address]
        options = ["--model", model.address, "--episodes", "6", "--seed", "40", "--json"]
        status = main([*arguments, *options, "--record", "here"])

    assert status == 0
    *episodes, _ = map(json.loads, capsys.readouterr().out.splitlines())
    recording = loaded(Path("here"), [episode["seed"] for episode in episodes])
    assert len(recording.episodes) == len(episodes) == 6
    for episode in episodes:
        summary = by_seed(recording)[episode["seed"]]
        assert (summary.length, summary.return_) == (episode["length"], episode["episode_return"])
        assert summary.endpoint == episode["endpoint"]
        assert summary.policy_version == 0
        assert summary.video is not None
        observations = recording.episode(summary.id).observations
        assert_identical(draw(observations[:-1]), recording.episode(summary.id).actions)


class NoPicture(Dot):
    """Renders nothing."""

    def render(self) -> Any:
        raise RuntimeError("no display")


def test_an_environment_that_fails_to_render_is_recorded_without_a_video(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EnvServer(NoPicture, num_envs=2, record=tmp_path) as server:
        evaluate(server.address, draw, episodes=2, seed=1)

    assert {summary.video for summary in loaded(tmp_path, range(1, 3)).episodes} == {None}
    assert capfd.readouterr().err.count("videos are not recorded: RuntimeError: no display") == 1


def test_a_writer_without_pyav_records_without_videos_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "av.py").write_text("raise ImportError('no FFmpeg')")
    monkeypatch.syspath_prepend(tmp_path)
    with EnvServer(Dot, num_envs=2, record=tmp_path / "recorded") as server:
        evaluate(server.address, draw, episodes=4, seed=1)

    recording = loaded(tmp_path / "recorded", range(1, 5))
    assert {summary.video for summary in recording.episodes} == {None}
    said = capfd.readouterr().err
    assert said.count("videos are not recorded: ") == said.count("need PyAV: pip install") == 1


def same_step() -> Any:
    mode = gymnasium.vector.AutoresetMode.SAME_STEP
    return gymnasium.vector.SyncVectorEnv([Dot, Dot], autoreset_mode=mode)


def test_an_environment_without_last_observations_says_so_and_serves(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with EnvServer(same_step, record=tmp_path) as server:
        evaluate(server.address, draw, episodes=2, seed=1)

    assert not (tmp_path / "recording.json").exists()
    assert "autoreset mode same_step" in capfd.readouterr().err


def test_a_writer_that_dies_is_said_once_and_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = child_pids()
    writer = WriterHandle(RecordOptions(tmp_path))
    writer.put("0", Stream(INFO, "", "none"), 0)
    writer.put("0", cart_pole(3, seed=1), 0)
    writer.put("0", replace(cart_pole(3, seed=2), ends=False), 0)
    loaded(tmp_path, [1])
    (pid,) = child_pids() - others
    assert eventually(lambda: list(tmp_path.glob("episodes/*.tmp")), WRITER_S)

    os.kill(pid, signal.SIGKILL)

    assert eventually(lambda: not writer.put("0", cart_pole(3, seed=2), 1))
    writer.close(10.0)
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing more is recorded to {tmp_path}: [Errno 32] Broken pipe"
    ]
    written(tmp_path, INFO, cart_pole(3, seed=3))
    assert [summary.seed for summary in load(tmp_path).episodes] == [1, 3]
    files = sorted(path.name for path in (tmp_path / "episodes").glob("[!.]*"))
    assert files == ["000001.parquet", "000002.parquet"]


def test_an_episode_that_is_abandoned_leaves_no_file_while_the_writer_goes_on(
    tmp_path: Path,
) -> None:
    writer = WriterHandle(RecordOptions(tmp_path))
    writer.put("0", Stream(INFO, "", "none"), 0)
    writer.put("0", replace(cart_pole(3, seed=1), episode="a", ends=False), 0)
    episodes = tmp_path / "episodes"
    assert eventually(lambda: list(episodes.glob("*.tmp")), WRITER_S)

    writer.put("0", Abandoned("a"))

    assert eventually(lambda: not list(episodes.glob("*.tmp")), WRITER_S)
    writer.close(WRITER_S)
    assert list(episodes.iterdir()) == []


def test_a_queue_without_room_refuses_and_recovers(tmp_path: Path) -> None:
    writer = WriterHandle(RecordOptions(tmp_path))
    writer.put("0", Stream(INFO, "", "none"), 0)
    half = 2**25

    taken = [writer.put("0", cart_pole(3, seed=number), half) for number in range(40)]

    assert False in taken
    assert eventually(lambda: writer.put("0", cart_pole(5, seed=99), half), WRITER_S)
    writer.close(WRITER_S)
    assert len(load(tmp_path).episodes) == sum(taken) + 1


def test_who_waits_for_room_in_the_queue_loses_nothing(tmp_path: Path) -> None:
    writer = WriterHandle(RecordOptions(tmp_path), WRITER_S)
    writer.put("0", Stream(INFO, "", "none"), 0)

    assert all(writer.put("0", cart_pole(3, seed=number), 2**25) for number in range(40))
    writer.close(WRITER_S)
    assert len(load(tmp_path).episodes) == 40


def test_what_the_writer_has_not_taken_in_time_is_said_to_be_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = child_pids()
    writer = WriterHandle(RecordOptions(tmp_path))
    writer.put("0", Stream(INFO, "", "none"), 0)
    writer.put("0", cart_pole(3, seed=0), 0)
    loaded(tmp_path, [0])
    (pid,) = child_pids() - others

    os.kill(pid, signal.SIGSTOP)
    try:
        writer.put("0", cart_pole(200_000, seed=1), 0)  # which no pipe holds
        writer.put("0", cart_pole(3, seed=2), 0)
        writer.close(0.1)
    finally:
        os.kill(pid, signal.SIGCONT)

    lost, alone = [record.getMessage() for record in caplog.records]
    assert lost.startswith("the last steps are not recorded")
    assert alone == f"the last episodes are still being written to {tmp_path}, by process {pid}"
    writer.close(WRITER_S)
    assert set(by_seed(load(tmp_path))) == {0, 1}
