"""Trainings and recordings that are found below a folder, and what is not."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.watching.samples import write_progress, write_recording
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.watch.runs import MOST_POINTS, PAGE_EPISODES, RunFolder, thinned
from tests.odd_files import IRREGULAR, NEVER_ENDS, put
from tests.unit.recording.recordings import INFO, cart_pole, cart_poles, written


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def seen(folder: Path) -> RunFolder:
    """Return a folder that has been looked through."""
    runs = RunFolder(folder)
    runs.overview()
    return runs


@pytest.mark.parametrize("number", [0, 1, 2, MOST_POINTS, MOST_POINTS + 1, 12_345])
def test_few_points_are_kept_with_the_last(number: int) -> None:
    points = thinned(list(range(number)))

    assert len(points) <= MOST_POINTS
    assert points[-1:] == list(range(number))[-1:]
    assert len(points) == number or len(points) > MOST_POINTS / 2 - 1


def test_a_folder_that_is_missing_shows_nothing(tmp_path: Path) -> None:
    overview = RunFolder(tmp_path / "runs").overview()

    assert (overview["runs"], overview["recordings"]) == ([], [])


def test_trainings_are_found_with_their_curve(tmp_path: Path) -> None:
    write_progress(tmp_path / "deep" / "one", 3)
    runs = seen(tmp_path)

    curve = runs.curve("deep/one")

    assert [run["name"] for run in runs.overview()["runs"]] == ["deep/one"]
    assert runs.overview()["runs"][0]["is_running"]
    assert curve is not None
    assert [row["env_steps"] for row in curve] == [4000, 8000, 12000]
    assert math.isnan(curve[0]["return_mean"])
    assert curve[-1]["iteration"] == 3


def test_a_training_may_be_called_checkpoints_and_none_is_looked_for_in_a_checkpoint(
    tmp_path: Path,
) -> None:
    write_progress(tmp_path / "checkpoints" / "one", 1)
    write_progress(tmp_path / "two" / "checkpoint-000010" / "learner_group", 1)
    (tmp_path / "two" / "checkpoint-000010" / "class_and_ctor_args.pkl").touch()

    assert [run["name"] for run in seen(tmp_path).overview()["runs"]] == ["checkpoints/one"]


def test_folders_that_are_too_many_to_look_through_are_said(tmp_path: Path) -> None:
    for number in range(5_000):
        (tmp_path / f"{number:04}").mkdir()
    write_progress(tmp_path / "last", 1)

    found = seen(tmp_path).overview()
    small = seen(tmp_path / "last").overview()

    assert found["runs"] == []
    assert "more than 5,000 folders" in found["problem"]
    assert [run["name"] for run in small["runs"]] == ["."]
    assert small["problem"] == ""


def test_a_recording_may_be_called_episodes(tmp_path: Path) -> None:
    write_recording(tmp_path / "runs" / "episodes", 1)

    assert seen(tmp_path / "runs").overview()["recordings"] == ["episodes"]


def test_a_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    write_progress(tmp_path / "one", 2)
    with (tmp_path / "one" / "progress.csv").open("a") as file:
        file.write("3,120")

    curve = seen(tmp_path).curve("one")

    assert curve is not None
    assert len(curve) == 2


def test_a_training_that_goes_on_is_read_again(tmp_path: Path) -> None:
    write_progress(tmp_path / "one", 2)
    runs = seen(tmp_path)
    assert len(runs.curve("one") or []) == 2

    write_progress(tmp_path / "one", 5)

    assert len(runs.curve("one") or []) == 5


def test_a_new_training_appears_at_the_next_look(tmp_path: Path) -> None:
    clock = Clock()
    runs = RunFolder(tmp_path, clock)
    assert runs.overview()["runs"] == []
    write_progress(tmp_path / "one", 2)
    assert runs.overview()["runs"] == []
    clock.now_s += 10.0

    assert [run["name"] for run in runs.overview()["runs"]] == ["one"]


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "one/../../secret", "", "."])
def test_a_name_that_was_not_found_is_no_path(name: str, tmp_path: Path) -> None:
    write_progress(tmp_path / "secret", 2)
    write_recording(tmp_path / "secret", 2)
    write_progress(tmp_path / "runs" / "one", 2)
    runs = seen(tmp_path / "runs")

    assert runs.curve(name) is None
    assert runs.episodes(name, "newest", 0) is None
    assert runs.episode(name, "000001") is None
    assert runs.video(name, "000001") is None


def test_a_file_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    (tmp_path / "one" / "progress.csv").mkdir(parents=True)
    write_progress(tmp_path / "two", 1)
    runs = seen(tmp_path)
    (tmp_path / "two" / "progress.csv").unlink()
    (tmp_path / "two" / "progress.csv").mkdir()

    assert runs.curve("one") is None  # a folder of that name is no training
    with pytest.raises(ConfigurationError, match=r"cannot read .*two"):
        runs.curve("two")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"a,b\n\xff,1\n", "UnicodeDecodeError"), (b"a,b\n" + b"1" * 200_000 + b",1\n", "field")],
)
def test_a_file_that_is_no_table_says_so(content: bytes, reason: str, tmp_path: Path) -> None:
    write_progress(tmp_path / "one", 1)
    (tmp_path / "one" / "progress.csv").write_bytes(content)

    with pytest.raises(ConfigurationError, match=rf"cannot read .*one.*{reason}"):
        seen(tmp_path).curve("one")


def test_a_file_that_may_not_be_looked_at_hides_no_other(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "progress.csv").symlink_to("progress.csv")  # each look at it fails
    write_progress(tmp_path / "two", 1)

    runs = seen(tmp_path)

    assert [run["name"] for run in runs.overview()["runs"]] == ["two", "one"]
    with pytest.raises(ConfigurationError, match=r"cannot read .*one"):
        runs.curve("one")


@pytest.mark.parametrize(
    ("order", "first"), [("newest", 119), ("highest", 119), ("lowest", 0), ("longest", 119)]
)
def test_episodes_come_in_pages_in_the_order_that_is_asked_for(
    order: str, first: int, tmp_path: Path
) -> None:
    write_recording(tmp_path / "kept", 120)
    runs = seen(tmp_path)

    page = runs.episodes("kept", order, 0)
    rest = runs.episodes("kept", order, 100)

    assert page is not None
    assert rest is not None
    assert page["total"] == 120
    assert len(page["episodes"]) == PAGE_EPISODES
    assert len(rest["episodes"]) == 20
    assert page["episodes"][0]["id"] == f"{first:06}"


def test_an_episode_has_its_facts_also_where_its_file_is_gone(tmp_path: Path) -> None:
    write_recording(tmp_path / "kept", 3)
    runs = seen(tmp_path)

    episode = runs.episode("kept", "000002")

    assert episode is not None
    assert (episode["return_"], episode["seed"], episode["video"]) == (12.0, 2, False)
    assert episode["returns"] == []
    assert "cannot be read" in episode["problem"]
    assert runs.episode("kept", "../../000002") is None
    assert runs.video("kept", "000002") is None


def test_an_unknown_order_is_refused(tmp_path: Path) -> None:
    write_recording(tmp_path / "kept", 3)

    assert seen(tmp_path).episodes("kept", "__class__", 0) is None


@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_what_is_no_file_is_read_neither_as_a_training_nor_as_a_recording(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    write_progress(tmp_path / "run", 1)
    cart_poles(tmp_path / "kept", 1)
    runs = seen(tmp_path)
    put(make, tmp_path / "run" / "progress.csv")
    put(make, tmp_path / "kept" / "recording.json")

    with pytest.raises(ConfigurationError, match="cannot read"):
        runs.curve("run")
    with pytest.raises(ConfigurationError, match=r"recording\.json"):
        runs.episodes("kept", "newest", 0)


@pytest.mark.parametrize("name", ["progress.csv", "folder"])
def test_no_link_leads_to_a_training_elsewhere(name: str, tmp_path: Path) -> None:
    write_progress(tmp_path / "private", 3)
    write_progress(tmp_path / "shown" / "run", 1)
    runs = seen(tmp_path / "shown")
    if name == "folder":
        (tmp_path / "shown" / "run").rename(tmp_path / "before")
        (tmp_path / "shown" / "run").symlink_to(tmp_path / "private")
    else:
        (tmp_path / "shown" / "run" / name).unlink()
        (tmp_path / "shown" / "run" / name).symlink_to(tmp_path / "private" / name)

    with pytest.raises(ConfigurationError, match="symbolic link"):
        runs.curve("run")
    assert seen(tmp_path / "shown").overview()["runs"] == [] or name != "folder"


@pytest.mark.parametrize(
    "name", ["", "recording.json", "index.jsonl", "episodes", "episodes/000001.parquet"]
)
def test_no_link_leads_to_a_recording_elsewhere(name: str, tmp_path: Path) -> None:
    cart_poles(tmp_path / "private", 3)
    cart_poles(tmp_path / "shown" / "kept", 1)
    runs = seen(tmp_path / "shown")
    former = tmp_path / "shown" / "kept" / name
    former.rename(tmp_path / "before")
    former.symlink_to(tmp_path / "private" / name)

    found: object = None
    with suppress(ConfigurationError):
        found = runs.episodes("kept", "newest", 0)
        found = found and runs.episode("kept", "000002")
    assert found is None
    with suppress(ConfigurationError):
        episode = runs.episode("kept", "000001")
        assert episode is None or not episode["returns"] or name == "index.jsonl"


def test_a_linked_video_is_refused_and_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    frames = np.zeros((4, 16, 16, 3), np.uint8)
    written(tmp_path / "runs" / "kept", INFO, replace(cart_pole(3, seed=0), frames=frames))
    (tmp_path / "named").symlink_to("runs")
    runs = seen(tmp_path / "named")
    path = tmp_path / "runs" / "kept" / "episodes" / "000001.mp4"
    with runs.video("kept", "000001") as file:  # type: ignore[union-attr]
        assert file.read() == path.read_bytes()
    path.rename(tmp_path / "other.mp4")
    assert runs.video("kept", "000001") is None
    path.symlink_to(tmp_path / "other.mp4")

    with pytest.raises(ConfigurationError, match=r"000001\.mp4: it is a symbolic link"):
        runs.video("kept", "000001")


def test_folders_in_folders_without_end_hide_no_other(tmp_path: Path) -> None:
    write_progress(tmp_path / "run", 1)
    deep = tmp_path / "a"
    for _ in range(40):
        deep /= "a" * 90
        deep.mkdir(parents=True)
    write_progress(deep, 1)

    assert [run["name"] for run in seen(tmp_path).overview()["runs"]] == ["run"]


def test_a_table_that_is_too_large_says_so(tmp_path: Path) -> None:
    write_progress(tmp_path / "run", 1)
    os.truncate(tmp_path / "run" / "progress.csv", NEVER_ENDS)

    with pytest.raises(ConfigurationError, match="larger than"):
        seen(tmp_path).curve("run")


def test_an_episode_that_claims_to_be_endless_is_not_read(tmp_path: Path) -> None:
    cart_poles(tmp_path / "kept", 1)
    index = tmp_path / "kept" / "index.jsonl"
    index.write_bytes(index.read_bytes().replace(b'"length": 3', b'"length": 3000000000'))

    episode = seen(tmp_path).episode("kept", "000001")

    assert episode is not None
    assert "more than 10,000,000 steps" in episode["problem"]
