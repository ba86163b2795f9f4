import contextlib
import json
from pathlib import Path

import pytest

from rlmesh_ray.cli.commands.evaluate import EpisodesFile
from rlmesh_ray.errors import ConfigurationError, RlmeshError
from tests.unit.cli.full_disks import room_for


def opened(path: Path) -> contextlib.AbstractContextManager[EpisodesFile]:
    return contextlib.closing(EpisodesFile(path))


def test_an_earlier_file_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.write_text("precious")

    with pytest.raises(ConfigurationError, match="name another file"), opened(path):
        pass

    assert path.read_text() == "precious"


def test_a_file_without_episodes_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with pytest.raises(ZeroDivisionError), opened(path):
        raise ZeroDivisionError

    assert not path.exists()


@pytest.mark.parametrize("taken", [Path(), Path("/dev/full")])
def test_for_a_folder_or_a_device_the_remedy_is_another_name(taken: Path) -> None:
    with pytest.raises(ConfigurationError, match="folder or a device"), opened(taken):
        pass


def test_a_link_to_a_missing_file_counts_as_taken(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    path.symlink_to(tmp_path / "nowhere")

    with pytest.raises(ConfigurationError, match=r"exists.* remove it"), opened(path):
        pass


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "episodes.jsonl"

    with pytest.raises(ConfigurationError, match="nowhere"), opened(path):
        pass


def test_an_episode_is_written_at_once(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with opened(path) as file:
        file.add({"index": 0, "episode_return": float("inf")})

        written = json.loads(path.read_text())

    assert written == {"event": "episode", "index": 0, "episode_return": None}


def test_a_file_that_grows_too_large_is_named_and_keeps_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with room_for(100), opened(path) as file:
        file.add({"index": 0})
        file.add({"index": 1})
        with pytest.raises(RlmeshError) as caught:
            file.add({"index": 2, "cause": "x" * 100})

    reported = str(caught.value)
    assert reported.startswith(
        f"cannot write {path}: File too large; it holds 2 episodes; make room"
    )
    lines = path.read_text().splitlines()
    assert [json.loads(line)["index"] for line in lines] == [0, 1]


def test_a_full_disk_is_reported_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(Path, "open", lambda *_args, **_options: full)
        episodes = EpisodesFile(tmp_path / "episodes.jsonl")

        with pytest.raises(RlmeshError, match=r"episodes\.jsonl: No space left on"):
            episodes.add({"index": 0})


def test_a_file_that_only_fails_when_it_is_closed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "episodes.jsonl"
    real = path.open("xb", buffering=0)

    class Remote:
        write, fileno = real.write, real.fileno

        def close(self) -> None:
            real.close()
            raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(Path, "open", lambda *_args, **_options: Remote())
    with (
        pytest.raises(RlmeshError, match=r"episodes\.jsonl: Disk quota"),
        opened(path) as file,
    ):
        file.add({"index": 0})


@pytest.mark.parametrize("num_episodes", [0, 1])
def test_a_file_that_is_removed_meanwhile_is_no_error(num_episodes: int, tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with opened(path) as file:
        path.unlink()
        for index in range(num_episodes):
            file.add({"index": index})

    assert not path.exists()


def test_another_file_of_the_same_name_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"

    with opened(path):
        path.rename(tmp_path / "elsewhere")
        path.write_text("precious")

    assert path.read_text() == "precious"
