"""Opening files that a user names, or that are found in a folder, of any kind.

Opening a pipe waits for its writer, and reading a device may never end. A symbolic link in a folder
that others may write can lead to any file. What is checked here is the descriptor that is read.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

MOST_BYTES = 64 * 2**20
"""Of a file that is read at one time, unless its reader says otherwise."""
_MODES = {"rb": os.O_RDONLY, "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT}
_IRREGULAR = "it is not a regular file"
_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_REASONS = {
    errno.ELOOP: "it is a symbolic link, which is not followed here",
    errno.ENOTDIR: "part of its path is a symbolic link, which is not followed, or not a folder",
}


def open_file(path: Path, below: Path | None = None, mode: Literal["rb", "ab"] = "rb") -> BinaryIO:
    """Open a regular file; OSError: it cannot be opened, or is of another kind.

    No symbolic link below the folder ``below``, with which ``path`` begins, is followed. Systems
    that cannot open a file relative to a folder (Windows) follow them nevertheless.
    """
    descriptor = _descriptor(path, below, _MODES[mode])
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, _IRREGULAR, str(path))
        return open(path, mode, opener=lambda *_: descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, most_bytes: int = MOST_BYTES, below: Path | None = None) -> bytes:
    """Return the content of a regular file; OSError: see ``open_file``, or it has more bytes."""
    with open_file(path, below) as file:
        is_larger = os.fstat(file.fileno()).st_size > most_bytes
        data = b"" if is_larger else file.read(most_bytes + 1)
    if is_larger or len(data) > most_bytes:  # it may have grown
        raise OSError(errno.EFBIG, f"it is larger than {most_bytes:,} bytes", str(path))
    return data


def require_plain_files(folder: Path) -> None:
    """Raise OSError if a folder has anything but files and folders, such as a pipe.

    Who reads a pipe may wait for ever.
    """
    for name, _, files in os.walk(folder):
        for path in (os.path.join(name, file) for file in files):
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError(errno.EINVAL, _IRREGULAR, path)


def list_folder(path: Path, below: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, and those of the rest; see ``open_file``."""
    if os.scandir not in os.supports_fd:
        return _listed(path)
    descriptor = _descriptor(path, below, os.O_RDONLY | _FOLDER)
    try:
        return _listed(descriptor)
    finally:
        os.close(descriptor)


def _listed(folder: Path | int) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    others: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            kind = folders if entry.is_dir(follow_symlinks=False) else others
            kind.append(entry.name)
    return folders, others


def _descriptor(path: Path, below: Path | None, flags: int) -> int:
    if below is None or os.open not in os.supports_dir_fd:
        return os.open(path, flags | _FLAGS, 0o666)
    at = os.open(below, os.O_RDONLY | _FOLDER)
    try:
        *folders, name = path.relative_to(below).parts or (".",)
        for folder in folders:
            inner = os.open(folder, os.O_RDONLY | _FOLDER | _NO_LINK, dir_fd=at)
            os.close(at)
            at = inner
        return os.open(name, flags | _FLAGS | _NO_LINK, 0o666, dir_fd=at)
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror)
        raise OSError(error.errno, reason, str(path)) from error
    finally:
        os.close(at)
