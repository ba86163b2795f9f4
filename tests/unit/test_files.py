"""Files are opened without waiting, without following links, and without reading for ever."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rlmesh_ray.files import list_folder, open_file, read_file, require_plain_files
from tests.odd_files import IRREGULAR, put


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("make", IRREGULAR.values(), ids=IRREGULAR)
def test_what_is_no_regular_file_is_an_error_and_leaves_no_descriptor(
    make: Callable[[Path], None], below: bool, tmp_path: Path
) -> None:
    path = put(make, tmp_path / "it")
    before = os.listdir("/proc/self/fd")

    with pytest.raises(OSError, match="it"):
        open_file(path, tmp_path if below else None)

    assert os.listdir("/proc/self/fd") == before


def test_a_link_is_followed_only_where_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "shared" / "run").mkdir(parents=True)
    link = tmp_path / "shared" / "run" / "link"
    link.symlink_to(tmp_path / "secret")
    shared = tmp_path / "named"
    shared.symlink_to("shared")

    assert read_file(link) == b"secret"
    with pytest.raises(OSError, match="symbolic link"):
        open_file(shared / "run" / "link", shared)
    with pytest.raises(OSError, match="symbolic link"):
        open_file(link, tmp_path / "shared", "ab")
    link.unlink()
    link.write_bytes(b"shown")
    assert read_file(shared / "run" / "link", below=shared) == b"shown"


def test_no_folder_on_the_way_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_bytes(b"secret")
    (tmp_path / "shared" / "run").mkdir(parents=True)
    (tmp_path / "shared" / "run" / "link").symlink_to(tmp_path / "private")
    path = tmp_path / "shared" / "run" / "link"

    with pytest.raises(OSError, match="symbolic link"):
        read_file(path / "key", below=tmp_path / "shared")
    with pytest.raises(OSError, match="symbolic link"):
        list_folder(path, tmp_path / "shared")
    assert list_folder(path.parent, tmp_path / "shared") == ([], ["link"])


def test_what_takes_the_name_of_an_open_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"shown")
    (tmp_path / "secret").write_bytes(b"secret")

    with open_file(path, tmp_path) as file:
        path.unlink()
        path.symlink_to("secret")
        assert file.read() == b"shown"


def test_no_more_is_read_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")

    assert read_file(path, 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_file(path, 4)


def test_lines_are_added_to_a_new_file_and_to_one_that_is_there(tmp_path: Path) -> None:
    for line in (b"one\n", b"two\n"):
        with open_file(tmp_path / "file", tmp_path, "ab") as file:
            file.write(line)

    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"


def test_a_folder_with_a_pipe_in_its_depths_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").touch()
    (tmp_path / "link").symlink_to("inner/file")
    (tmp_path / "broken").symlink_to("nowhere")
    require_plain_files(tmp_path)
    os.mkfifo(tmp_path / "inner" / "pipe")

    with pytest.raises(OSError, match="not a regular file"):
        require_plain_files(tmp_path)
