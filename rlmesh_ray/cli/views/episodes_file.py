"""File of ``rlmesh-ray evaluate --output``."""

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from rlmesh_ray.errors import ConfigurationError, RlmeshError


class EpisodesFile:
    """Writes one line for each episode, and never leaves a part of a line.

    Args:
        path: Path of the file.
        file: The file, unbuffered: a killed run keeps its finished episodes, and closing does not
            write again what could not be written.
    """

    def __init__(self, path: Path, file: io.FileIO) -> None:
        self._path = path
        self._file = file
        self._size = 0
        self.num_episodes = 0
        """Number of episodes in the file."""

    def add(self, fields: Mapping[str, object]) -> None:
        """Write an episode at once.

        Raises:
            RlmeshError: The file can no longer be written.
        """
        line = json.dumps(_finite({"event": "episode", **fields})).encode() + b"\n"
        try:
            self._write(line)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.seek(self._file.truncate(self._size))
            raise self.failure(error) from error
        self._size += len(line)
        self.num_episodes += 1

    def failure(self, error: OSError) -> RlmeshError:
        """Return an error that names the file, the cause, its episodes and the remedy."""
        return RlmeshError(
            f"cannot write {self._path}: {_why(error)}; it holds {self.num_episodes} episodes; "
            "make room or lift the limit there, or name a file elsewhere, and evaluate again"
        )

    def _write(self, line: bytes) -> None:
        # A full disk takes a part first, and fails at the next write.
        rest = memoryview(line)
        while rest:
            rest = rest[self._file.write(rest) :]


@contextlib.contextmanager
def episodes_file(path: Path | None) -> Iterator[EpisodesFile | None]:
    """Open a new file for episodes, and remove it if it stays empty; None: no file.

    Raises:
        ConfigurationError: It exists or cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("xb", buffering=0)
    except FileExistsError as error:
        if not (path.is_file() or path.is_symlink()):
            raise ConfigurationError(
                f"{path} is a folder or a device; name a file that does not exist yet"
            ) from error
        raise ConfigurationError(
            f"{path} exists, and may hold episodes of an earlier run; name another file or "
            "remove it"
        ) from error
    except OSError as error:
        raise ConfigurationError(
            f"cannot write {path}: {_why(error)}; name a file elsewhere"
        ) from error
    episodes = EpisodesFile(path, file)
    try:
        yield episodes
    finally:
        is_empty = _is_empty(path, file)
        try:
            file.close()
        except OSError as error:  # some network disks report only now that they are full
            raise episodes.failure(error) from error
        if is_empty:
            path.unlink(missing_ok=True)


def _is_empty(path: Path, file: io.FileIO) -> bool:
    """Return whether the file is empty, and ``path`` still names it."""
    own = os.fstat(file.fileno())
    try:
        return not own.st_size and os.path.samestat(path.stat(), own)
    except OSError:
        return False  # it has been removed


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _finite(fields: Mapping[str, object]) -> dict[str, object]:
    """Replace NaN and infinities, which JSON does not have, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in fields.items()
    }
