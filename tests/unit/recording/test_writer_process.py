"""What the writer gets is what a reader finds; what it cannot write it says once."""

import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pyarrow.parquet as pq
import pytest

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.recording import load
from rlmesh_ray.recording.recorder import Abandoned, Segment, Stream
from rlmesh_ray.recording.store import RecordingInfo, Store
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.batch import leaves
from rlmesh_ray.spaces.spec import (
    BoxSpec,
    DictSpec,
    DiscreteSpec,
    MultiBinarySpec,
    MultiDiscreteSpec,
    TextSpec,
    TupleSpec,
)
from rlmesh_ray.testing.equality import assert_identical
from tests.unit.cli.full_disks import room_for
from tests.unit.recording.recordings import INFO, cart_pole, cart_poles, written

IMAGE = BoxSpec((32, 48, 3), "uint8", b"\0", b"\xff")
CAMERA = RecordingInfo("Camera-v0", IMAGE, DiscreteSpec(2), 25.0)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "rlmesh_ray.recording"):
        yield


def camera(length: int, shape: tuple[int, ...] = IMAGE.shape) -> Segment:
    """Return an episode in which a white bar falls from the top to the bottom."""
    images = np.zeros((length + 1, *shape), np.uint8)
    for row in range(length + 1):
        top = row * (shape[0] - 8) // length
        images[row, top : top + 8] = 255
    part = cart_pole(length, seed=1)
    part.columns[0] = images
    return part


def decoded(path: Path) -> list[Any]:
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


def test_arrays_come_back_as_they_were(tmp_path: Path) -> None:
    (part,) = cart_poles(tmp_path, num_episodes=1)

    recording = load(tmp_path)
    (summary,) = recording.episodes
    episode = recording.episode(summary.id)

    assert (summary.length, summary.return_, summary.seed, summary.lane) == (3, 3.0, 0, 0)
    assert (summary.terminated, summary.truncated, summary.video) == (True, False, None)
    assert (summary.policy_version, summary.endpoint) == (3, "127.0.0.1:50051")
    assert_identical(episode.observations, part.columns[0])
    assert_identical(episode.actions, part.columns[1][1:])
    assert_identical(episode.rewards, np.ones(3))
    assert episode.infos == [{}] * 4


def test_every_space_comes_back(tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    space = DictSpec(
        (
            ("camera", TupleSpec((IMAGE, BoxSpec((3,), "float16", bytes(2), b"\0\x7b")))),
            ("words", TextSpec(0, 9, "")),
            ("flags", MultiBinarySpec((2, 3))),
            ("small", MultiDiscreteSpec((3, 4), (2,), "uint16")),
            ("switches", BoxSpec((100,), "bool", b"\0", b"\1")),
        )
    )
    info = RecordingInfo("All-v0", space, DictSpec((("go", DiscreteSpec(5, -2)),)), 10.0)
    columns: list[Any] = [
        random.integers(256, size=(4, *IMAGE.shape)).astype(np.uint8),
        random.random((4, 3)).astype(np.float16),
        ("", "ä", "two words", "\n"),
        random.integers(2, size=(4, 2, 3)).astype(np.int8),
        random.integers(3, size=(4, 2)).astype(np.uint16),
        random.integers(2, size=(4, 100)).astype(bool),
        np.array([0, -2, 2, 1]),
    ]
    part = replace(cart_pole(3, seed=0), columns=columns + cart_pole(3, seed=0).columns[2:])
    assert len(part.columns) == len(leaves(info.row_space))

    written(tmp_path, info, part)
    episode = load(tmp_path).episode("000001")

    image, numbers, words, flags, small, switches, go = columns
    expected = {"words": words, "flags": flags, "small": small, "switches": switches}
    assert_identical(episode.observations, {"camera": (image, numbers), **expected})
    assert_identical(episode.actions, {"go": go[1:]})


def test_keys_with_slashes_and_boxes_without_elements_come_back(tmp_path: Path) -> None:
    one = BoxSpec((), "float32", bytes(4), np.float32(9).tobytes())
    nested = DictSpec((("b", one), ("c~1d", one)))
    names = (
        ("a/b", one),
        ("a", nested),
        ("a/c~1d", one),
        ("none", BoxSpec((0, 3), "int32", b"", b"")),
    )
    info = RecordingInfo("All-v0", DictSpec(names), DiscreteSpec(2), 10.0)
    columns = [np.full(4, number, np.float32) for number in range(4)]
    steps = cart_pole(3, seed=0)
    part = replace(steps, columns=[*columns, np.zeros((4, 0, 3), np.int32), *steps.columns[1:]])

    written(tmp_path, info, part)
    found = load(tmp_path).episode("000001").observations

    expected = {"a/b": columns[0], "a": {"b": columns[1], "c~1d": columns[2]}}
    expected |= {"a/c~1d": columns[3], "none": np.zeros((4, 0, 3), np.int32)}
    assert_identical(found, expected)


def test_columns_named_as_before_are_read(tmp_path: Path) -> None:
    one = BoxSpec((), "float32", bytes(4), np.float32(9).tobytes())
    info = RecordingInfo("All-v0", DictSpec((("a/b", one),)), DiscreteSpec(2), 10.0)
    steps = cart_pole(3, seed=0)
    written(tmp_path, info, replace(steps, columns=[np.ones(4, np.float32), *steps.columns[1:]]))
    path = tmp_path / "episodes" / "000001.parquet"
    table = pq.read_table(path)
    pq.write_table(
        table.rename_columns([name.replace("~1", "/") for name in table.column_names]), path
    )

    assert load(tmp_path).episode("000001").observations["a/b"].tolist() == [1.0] * 4


def test_an_episode_may_come_in_parts(tmp_path: Path) -> None:
    whole = cart_pole(6, seed=0)
    first = replace(whole, columns=[c[:3] for c in whole.columns], infos=[{}] * 3, ends=False)
    rest = replace(whole, columns=[c[3:] for c in whole.columns], infos=[{}] * 4, begins=False)

    written(tmp_path, INFO, first, rest)

    assert_identical(load(tmp_path).episode("000001").observations, whole.columns[0])
    assert load(tmp_path).episodes[0].length == 6


def test_an_episode_without_its_beginning_or_its_end_leaves_no_file(tmp_path: Path) -> None:
    whole = cart_pole(3, seed=0)
    headless, endless = replace(whole, begins=False), replace(whole, ends=False)

    written(tmp_path, INFO, headless, endless)

    assert load(tmp_path).episodes == []
    assert list((tmp_path / "episodes").iterdir()) == []


def test_an_episode_that_is_abandoned_leaves_no_file_and_the_others_go_on(tmp_path: Path) -> None:
    whole = cart_pole(3, seed=0)
    writer = EpisodeWriter(tmp_path, 1.0)
    writer.handle("0", Stream(INFO, "", "auto"))
    for name in ("a", "b"):
        writer.handle("0", replace(whole, episode=name, ends=False))

    writer.handle("0", Abandoned("a"))
    writer.handle("0", Abandoned("unknown"))

    assert len(list((tmp_path / "episodes").glob("*.tmp"))) == 1
    for name in ("a", "b"):
        writer.handle("0", replace(whole, episode=name, begins=False))
    writer.close()
    assert [summary.length for summary in load(tmp_path).episodes] == [7]


def test_infos_come_back_as_far_as_json_holds_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    info = {"a": np.float32(0.5), "b": np.arange(3), "c": {"d": [True, None]}, "e": "ä"}
    large = {"large": np.zeros(1000), "long": "x" * 5000, "thing": object()}
    large |= {"nan": np.float32("nan"), "endless": {"x": [1.0, float("inf")]}}
    part = replace(cart_pole(2, seed=0), infos=[{}, info | large, info | large])

    written(tmp_path, INFO, part)

    expected = {"a": 0.5, "b": [0, 1, 2], "c": {"d": [True, None]}, "e": "ä"}
    assert load(tmp_path).episode("000001").infos == [{}, expected, expected]
    said = [record.getMessage() for record in caplog.records]
    assert [text.split(" is not")[0] for text in said] == [
        "the info 'large'",
        "the info 'long'",
        "the info 'thing'",
        "the info 'nan'",
        "the info 'endless'",
    ]


def test_a_video_shows_each_observation_once(tmp_path: Path) -> None:
    part = camera(6)

    written(tmp_path, CAMERA, part)

    (summary,) = load(tmp_path).episodes
    assert summary.video == tmp_path / "episodes" / "000001.mp4"
    frames = decoded(summary.video)
    assert len(frames) == 7
    for frame, image in zip(frames, part.columns[0], strict=True):
        assert frame.shape == IMAGE.shape
        assert np.abs(frame.astype(int) - image).mean() < 12


@pytest.mark.parametrize("shape", [(33, 47, 3), (4, 32, 48), (32, 48), (32, 48, 4), (32, 48, 1)])
def test_images_of_other_shapes_have_videos_too(tmp_path: Path, shape: tuple[int, ...]) -> None:
    info = replace(CAMERA, observation_space=replace(IMAGE, shape=shape))
    part = camera(3, shape)

    written(tmp_path, info, part)

    frame = decoded(tmp_path / "episodes" / "000001.mp4")[-1]
    assert frame.shape[:2] == ((34, 48) if 33 in shape else (32, 48))
    assert_identical(load(tmp_path).episode("000001").observations, part.columns[0])


def test_frames_of_render_are_shown_where_no_image_is_observed(tmp_path: Path) -> None:
    frames = np.zeros((4, 20, 30, 3), np.uint8)
    frames[..., 1] = 200
    part = replace(cart_pole(3, seed=0), frames=frames)

    written(tmp_path, INFO, part)

    shown = decoded(tmp_path / "episodes" / "000001.mp4")
    assert len(shown) == 4
    assert np.abs(shown[2].astype(int) - frames[2]).max() < 16


def test_a_frame_that_the_codec_refuses_costs_the_video_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    too_wide = replace(cart_pole(2, seed=0), frames=np.zeros((3, 2, 20000, 3), np.uint8))

    written(tmp_path, INFO, too_wide, too_wide)

    assert [summary.video for summary in load(tmp_path).episodes] == [None, None]
    (record,) = caplog.records
    assert record.getMessage().startswith("videos are not recorded: ")
    assert sorted(path.suffix for path in (tmp_path / "episodes").iterdir()) == [".parquet"] * 2


def no_pyav(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "av", None)


def no_libx264(patch: pytest.MonkeyPatch) -> None:
    def add_stream(name: str, **_: object) -> Any:
        return av.codec.Codec(f"{name} of another FFmpeg", "w")  # which fails

    patch.setattr(av, "open", lambda *_, **__: SimpleNamespace(add_stream=add_stream))


@pytest.mark.parametrize(
    ("missing", "words"),
    [(no_pyav, r"need PyAV: pip install .*\(.*av"), (no_libx264, "no libx264.*pip install")],
)
def test_a_missing_codec_costs_the_videos_alone_and_is_said_once_with_its_remedy(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    missing: Callable[[pytest.MonkeyPatch], None],
    words: str,
) -> None:
    missing(monkeypatch)

    written(tmp_path, CAMERA, camera(3), camera(4))

    recording = load(tmp_path)
    assert [(each.length, each.video) for each in recording.episodes] == [(3, None), (4, None)]
    assert recording.episode("000002").observations.shape == (5, *IMAGE.shape)
    (record,) = caplog.records
    assert re.match(f"videos are not recorded: .*{words}", record.getMessage())
    assert sorted(path.suffix for path in (tmp_path / "episodes").iterdir()) == [".parquet"] * 2


def test_a_video_whose_frames_cease_is_deleted_and_its_episode_kept(tmp_path: Path) -> None:
    whole = cart_pole(6, seed=0)
    frames = np.zeros((3, 20, 30, 3), np.uint8)
    first = replace(whole, columns=[c[:3] for c in whole.columns], infos=[{}] * 3, ends=False)
    rest = replace(whole, columns=[c[3:] for c in whole.columns], infos=[{}] * 4, begins=False)

    written(tmp_path, INFO, replace(first, frames=frames), rest)

    assert [(each.length, each.video) for each in load(tmp_path).episodes] == [(6, None)]
    assert [path.name for path in (tmp_path / "episodes").iterdir()] == ["000001.parquet"]


def test_a_disk_that_is_full_in_the_midst_of_a_video_costs_the_video_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    noise = np.random.default_rng(1).integers(256, size=(11, 64, 96, 3), dtype=np.uint8)
    part = replace(cart_pole(10, seed=0), frames=noise)  # 3 kB, and 31 kB of video
    writer = EpisodeWriter(tmp_path, 1.0)
    writer.handle("0", Stream(INFO, "", "auto"))

    with room_for(10_000):
        writer.handle("0", part)
        writer.handle("0", part)
    writer.handle("0", part)
    writer.close()

    recording = load(tmp_path)
    assert [each.video is None for each in recording.episodes] == [True, True, False]
    assert recording.episode("000001").summary.length == 10
    assert len(decoded(tmp_path / "episodes" / "000003.mp4")) == 11
    (record,) = caplog.records
    assert "videos are not recorded: OSError: " in record.getMessage()
    assert not list((tmp_path / "episodes").glob(".*"))


def test_recording_stops_at_its_size_and_deletes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = [cart_pole(200, seed=number) for number in range(20)]

    written(tmp_path, INFO, *parts, max_gb=20e-6)

    recording = load(tmp_path)
    assert 2 < len(recording.episodes) < 10
    assert recording.episodes[0].id == "000001"
    (record,) = caplog.records
    assert "recording stops" in record.getMessage()


def test_rows_that_come_one_after_the_other_share_a_group(tmp_path: Path) -> None:
    whole = cart_pole(99, seed=0)
    parts = [
        replace(
            whole,
            columns=[column[row : row + 1] for column in whole.columns],
            infos=whole.infos[row : row + 1],
            begins=row == 0,
            ends=row == 99,
        )
        for row in range(100)
    ]

    written(tmp_path, INFO, *parts)

    (path,) = tmp_path.glob("episodes/*.parquet")
    metadata = pq.ParquetFile(path).metadata
    assert (metadata.num_rows, metadata.num_row_groups) == (100, 1)
    assert_identical(load(tmp_path).episode("000001").observations, whole.columns[0])


def endless(num_steps: int) -> Segment:
    """Return the beginning of an episode."""
    return replace(cart_pole(num_steps, seed=0), ends=False)


def size_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "episodes").iterdir())


def test_an_episode_without_an_end_stops_at_the_size_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = EpisodeWriter(tmp_path, max_gb=20e-6)
    writer.handle("0", Stream(INFO, "", "auto"))
    begin = endless(200)
    sizes = []
    for part in (begin, *[replace(begin, begins=False)] * 20):
        writer.handle("0", part)
        sizes.append(size_bytes(tmp_path))
    writer.handle("0", cart_pole(3, seed=1))
    writer.close()

    assert 10_000 < max(sizes) < 30_000
    assert size_bytes(tmp_path) == 0
    assert ["recording stops" in record.getMessage() for record in caplog.records] == [True]


def test_a_running_episode_that_is_begun_anew_counts_once(tmp_path: Path) -> None:
    parts = [endless(200) for _ in range(20)]

    written(tmp_path, INFO, *parts, cart_pole(3, seed=0), max_gb=20e-6)

    assert len(load(tmp_path).episodes) == 1


def test_a_running_episode_of_another_writer_counts_too(tmp_path: Path) -> None:
    other = EpisodeWriter(tmp_path, max_gb=1.0)
    other.handle("0", Stream(INFO, "", "auto"))
    other.handle("0", endless(2000))

    written(tmp_path, INFO, cart_pole(3, seed=0), max_gb=20e-6)
    other.close()

    assert load(tmp_path).episodes == []


def test_many_writers_stop_at_the_size_together(tmp_path: Path) -> None:
    written(tmp_path, INFO, *[cart_pole(3000, seed=0)] * 42)
    most = 1.1 * size_bytes(tmp_path)
    writers = [EpisodeWriter(tmp_path, most / 1e9) for _ in range(40)]
    for writer in writers:
        writer.handle("0", Stream(INFO, "", "auto"))

    for writer in writers:  # each too little to look for others if there were none
        for seed in range(10):
            writer.handle("0", cart_pole(20, seed=seed))

    for writer in writers:
        writer.close()
    assert 0.99 * most < size_bytes(tmp_path) < 1.04 * most


def test_what_a_living_writer_has_not_ended_is_kept_and_what_is_days_old_is_deleted(
    tmp_path: Path,
) -> None:
    living = EpisodeWriter(tmp_path, max_gb=1.0)
    living.handle("0", Stream(INFO, "", "auto"))
    living.handle("0", endless(3))
    left_over = Store(tmp_path).temporary_path()
    left_over.touch()
    days_ago = time.time() - 3 * 86_400
    os.utime(left_over, (days_ago, days_ago))

    written(tmp_path, INFO, cart_pole(4, seed=0))
    living.handle("0", replace(cart_pole(4, seed=0), begins=False))
    living.close()

    assert [summary.length for summary in load(tmp_path).episodes] == [4, 8]
    files = sorted(path.name for path in (tmp_path / "episodes").iterdir())
    assert files == ["000001.parquet", "000002.parquet"]


def test_several_writers_share_a_recording(tmp_path: Path) -> None:
    writers = [EpisodeWriter(tmp_path, 1.0) for _ in range(3)]
    for number, writer in enumerate(writers):
        writer.handle("0", Stream(INFO, str(number), "auto"))
    for length in range(3, 9):
        for writer in writers:
            writer.handle("0", cart_pole(length, seed=length))
    for writer in writers:
        writer.close()

    recording = load(tmp_path)
    assert [summary.id for summary in recording.episodes] == [f"{n:06}" for n in range(1, 19)]
    for summary in recording.episodes:
        assert len(recording.episode(summary.id).rewards) == summary.length


def test_another_environment_is_not_mixed_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cart_poles(tmp_path, num_episodes=1)

    written(tmp_path, CAMERA, camera(3), camera(3))

    assert len(load(tmp_path).episodes) == 1
    (record,) = caplog.records
    assert "has episodes of CartPole-v1" in record.getMessage()


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    writer = EpisodeWriter(tmp_path / "file", 1.0)
    for key in ("0", "1"):
        writer.handle(key, Stream(INFO, "", "auto"))
        writer.handle(key, cart_pole(3, seed=0))

    (record,) = caplog.records
    assert "nothing is recorded" in record.getMessage()


def test_a_disk_that_is_full_for_a_while_costs_the_episodes_of_that_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = EpisodeWriter(tmp_path, 1.0)
    writer.handle("0", Stream(INFO, "", "auto"))
    folder, away = tmp_path / "episodes", tmp_path / "away"

    writer.handle("0", cart_pole(3, seed=0))
    folder.rename(away)  # files cannot be made there
    writer.handle("0", cart_pole(4, seed=0))
    writer.handle("0", cart_pole(5, seed=0))
    away.rename(folder)
    writer.handle("0", cart_pole(6, seed=0))
    writer.close()

    assert [summary.length for summary in load(tmp_path).episodes] == [3, 6]
    (record,) = caplog.records
    assert "each further one is tried: FileNotFoundError" in record.getMessage()


@pytest.mark.parametrize("size", [0, 100])
def test_a_full_disk_leaves_no_rests_of_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    writer = EpisodeWriter(tmp_path, 1.0)
    writer.handle("0", Stream(CAMERA, "", "auto"))

    with room_for(size):
        writer.handle("0", camera(3))
        with pytest.raises(ConfigurationError, match="cannot be written"):
            Store(tmp_path).require(CAMERA)
    writer.close()

    assert list((tmp_path / "episodes").iterdir()) == []
    assert "File too large" in caplog.text
