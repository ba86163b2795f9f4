"""What `render` returns becomes the video; where it fails, only the video is missing."""

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from rlmesh_ray.recording import RecordOptions, load
from rlmesh_ray.recording.recorder import Message, Recorder, Stream, info_of
from rlmesh_ray.recording.writer_process import EpisodeWriter
from rlmesh_ray.spaces.contract import AutoresetMode, EnvContract
from tests.unit.recording.recordings import INFO

CONTRACT = EnvContract(
    INFO.env_id,
    INFO.observation_space,
    INFO.action_space,
    1,
    AutoresetMode.NEXT_STEP,
    render_mode="rgb_array",
)
WHITE = np.full((16, 32, 3), 255, np.uint8)


@pytest.fixture(autouse=True)
def _all_is_logged(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "rlmesh_ray.recording"):
        yield


def rendered(result: Any) -> Any:
    """Return one lane's frame, or fail as an environment does."""
    if isinstance(result, Exception):
        raise result
    return [result]


def record(folder: Path, episodes: list[list[Any]], flush_after: int | None = None) -> None:
    """Record episodes of one lane.

    Args:
        folder: Of the recording.
        episodes: What `render` returns or raises, by episode and row.
        flush_after: The row of each episode after which a block is handed over.
    """
    writer = EpisodeWriter(folder, 1.0)
    writer.handle("0", Stream(info_of(CONTRACT), "", "auto"))

    def put(key: str, message: Message, _: int) -> bool:
        writer.handle(key, message)
        return True

    handle: Any = SimpleNamespace(options=RecordOptions(folder), put=put, new_stream=lambda *_: "0")
    recorder = Recorder(handle, CONTRACT, "")
    for results in episodes:
        for row, result in enumerate(results):
            render = partial(rendered, result)
            columns: list[Any] = [np.full((1, 4), row, np.float32)]
            if row == 0:
                recorder.reset([0], [], columns, {}, render)
            else:
                is_over = np.array([row == len(results) - 1])
                columns += [np.zeros(1, np.int64), np.ones(1), is_over, np.array([False])]
                recorder.step(columns, {}, render)
            if row == flush_after:
                recorder.flush()
    recorder.flush()
    writer.close()


def decoded(path: Path | None) -> list[Any]:
    assert path is not None
    with av.open(str(path)) as file:
        return [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]


@pytest.mark.parametrize("flush_after", [None, 1], ids=["one block", "two blocks"])
@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (RuntimeError("no display"), "RuntimeError: no display"),
        (WHITE[:8], "ValueError: render gave 1 frames of the shapes "),
    ],
    ids=["raises", "another size"],
)
def test_a_render_that_fails_in_an_episode_costs_its_video_alone(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    failure: Any,
    words: str,
    flush_after: int | None,
) -> None:
    whole, broken = [WHITE] * 4, [WHITE, WHITE, failure, WHITE, WHITE]

    record(tmp_path, [whole, broken, whole], flush_after)

    recording = load(tmp_path)
    assert [each.length for each in recording.episodes] == [3, 4, 3]
    assert [each.video is None for each in recording.episodes] == [False, True, True]
    assert len(decoded(recording.episodes[0].video)) == 4
    assert recording.episode("000002").observations[:, 0].tolist() == [0, 1, 2, 3, 4]
    (logged,) = caplog.records
    assert logged.getMessage().startswith(f"videos are not recorded: {words}")


def test_frames_with_alpha_are_shown_in_their_colours(tmp_path: Path) -> None:
    colours = np.zeros((16, 32, 4), np.uint8)
    colours[..., 1], colours[..., 3] = 200, 255

    record(tmp_path, [[colours] * 3])

    (summary,) = load(tmp_path).episodes
    shown = decoded(summary.video)
    assert len(shown) == 3
    assert np.abs(shown[1].astype(int) - colours[..., :3]).max() < 16
