"""What may have a file's name: things that are no files, that never end, or that hold nonsense."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

NEVER_ENDS = 2**40
"""Size of a file that no machine holds; the disk holds none of it."""


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, NEVER_ENDS)


IRREGULAR: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "broken link": lambda path: path.symlink_to("nowhere"),
    "endless link": lambda path: path.symlink_to(path.name),
}
"""Makes each of them at a path."""
NONSENSE: dict[str, Callable[[Path], object]] = {
    "nothing": Path.touch,
    "bytes": lambda path: path.write_bytes(bytes(range(256)) * 9),
    "endless": _endless,
    "deep": lambda path: path.write_bytes(b"[" * 200_000),
    "a list": lambda path: path.write_text("[1]\n"),
    "a number": lambda path: path.write_text("1e999\n"),
}
"""Writes each of them to a path."""


def put(make: Callable[[Path], object], path: Path) -> Path:
    """Make something in place of a file; return its path."""
    path.unlink(missing_ok=True)
    make(path)
    return path
