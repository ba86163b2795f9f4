"""RunFolder: trainings and recordings below a folder, found by name and never by a path."""

import csv
import io
import itertools
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from rlmesh_ray.errors import ConfigurationError, RlmeshError
from rlmesh_ray.files import list_folder, open_file, read_file
from rlmesh_ray.watch.live import SharedAnswer

if TYPE_CHECKING:
    from rlmesh_ray.recording import EpisodeSummary, Recording

T = TypeVar("T")

PROGRESS, RECORDING, INDEX = "progress.csv", "recording.json", "index.jsonl"
MOST_POINTS = 400
"""Points of a curve, and of the rewards of an episode."""
PAGE_EPISODES = 50
_MOST_STEPS = 10_000_000
_PROGRESS_BYTES = 32 * 2**20
_MOST_FOLDERS = 5_000
_DEEPEST = 32
"""Levels of folders that are looked through."""
_MOST_LOADED = 32
_SCAN_PERIOD_S = 5.0
_RUNNING_S = 120.0
"""A training that has written something this recently counts as running."""
_CHECKPOINT = "class_and_ctor_args.pkl"
"""A folder with this file is a checkpoint of RLlib: dozens of folders, none with a training."""
_ORDERS: dict[str, tuple[str, bool]] = {
    "newest": ("ended_at", True),
    "highest": ("return_", True),
    "lowest": ("return_", False),
    "longest": ("length", True),
}


class RunFolder:
    """The ``progress.csv`` files and the recordings below a folder. For several threads.

    Names that a browser sends are looked up among those that were found; they are no paths.

    Args:
        folder: The folder; it may be missing yet.
        clock: Returns seconds that only grow.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._scanned = SharedAnswer[None](clock)
        self._problem = ""
        self._runs: dict[str, Path] = {}
        self._recordings: dict[str, Path] = {}
        self._loaded: dict[Path, tuple[tuple[int, int], Any]] = {}  # stamp, content

    def overview(self) -> dict[str, Any]:
        """Return the names of the trainings, the last written first, and of the recordings.

        The problem says that there are too many folders to look through all.
        """
        self._scanned.ask(self._scan, lambda took_s: max(_SCAN_PERIOD_S, took_s))
        now_s, runs = time.time(), self._runs  # a scan replaces them
        written = {name: _stamp(path)[0] / 1e9 for name, path in runs.items()}
        return {
            "folder": str(self._folder),
            "runs": [
                {"name": name, "is_running": now_s - written[name] < _RUNNING_S}
                for name in sorted(runs, key=lambda name: -written[name])
            ],
            "recordings": sorted(self._recordings),
            "problem": self._problem,
        }

    def curve(self, run: str) -> list[dict[str, Any]] | None:
        """Return rows of a training, evenly chosen, with the last; None: there is no such one."""
        path = self._runs.get(run)
        return None if path is None else self._load(path, self._read_progress)

    def episodes(self, recording: str, order: str, first: int) -> dict[str, Any] | None:
        """Return a page of a recording's episodes; None: there is no such recording or order."""
        path = self._recordings.get(recording)
        if path is None or order not in _ORDERS:
            return None
        field, is_reversed = _ORDERS[order]
        ordered = sorted(
            self._recording(path).episodes, key=lambda each: max(-math.inf, getattr(each, field))
        )
        if is_reversed:
            ordered.reverse()
        page = ordered[max(first, 0) :][:PAGE_EPISODES]
        return {"total": len(ordered), "episodes": list(map(_facts, page))}

    def episode(self, recording: str, episode: str) -> dict[str, Any] | None:
        known = self._episode(recording, episode)
        if known is None:
            return None
        facts = {**_facts(known), "returns": [], "problem": ""}
        if known.length > _MOST_STEPS:
            return {**facts, "problem": f"it has more than {_MOST_STEPS:,} steps"}
        try:
            rewards = self._recording(self._recordings[recording]).rewards(known.id)
            returns = enumerate(itertools.accumulate(map(float, rewards)), 1)
            facts["returns"] = thinned([{"x": step, "y": total} for step, total in returns])
        except RlmeshError as error:
            facts["problem"] = str(error)
        return facts

    def video(self, recording: str, episode: str) -> BinaryIO | None:
        known = self._episode(recording, episode)
        if known is None or known.video is None:
            return None
        try:
            return open_file(known.video, self._folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(known.video, error) from error

    def _episode(self, recording: str, episode: str) -> "EpisodeSummary | None":
        path = self._recordings.get(recording)
        try:
            return None if path is None else self._recording(path).summary(episode)
        except ConfigurationError:  # it has no such episode
            return None

    def _recording(self, path: Path) -> "Recording":
        from rlmesh_ray.recording import Recording

        return self._load(path / INDEX, lambda _: Recording(path, self._folder))

    def _scan(self) -> None:
        runs, recordings, problem = {}, {}, ""
        pending, number = [self._folder], 0
        while pending:
            if number == _MOST_FOLDERS:
                problem = (
                    f"{self._folder} has more than {number:,} folders, and the others are not "
                    "shown: name one inside of it (--folder)"
                )
                break
            number += 1
            path = pending.pop()
            try:
                folders, files = list_folder(path, self._folder)
            except OSError:  # it is gone, or may not be read
                continue
            parts = path.relative_to(self._folder).parts
            shown = "/".join(parts) or "."
            if PROGRESS in files:
                runs[shown] = path / PROGRESS
            if RECORDING in files:
                recordings[shown] = path
                folders = [each for each in folders if each != "episodes"]
            if _CHECKPOINT not in files and len(parts) < _DEEPEST:
                pending += [path / each for each in sorted(folders, reverse=True)]
        self._runs, self._recordings, self._problem = runs, recordings, problem

    def _load(self, path: Path, read: Callable[[Path], T]) -> T:
        try:
            stamp = _stamp(path)
            loaded = self._loaded.get(path)
            if loaded is None or loaded[0] != stamp:
                loaded = self._loaded[path] = stamp, read(path)
                if len(self._loaded) > _MOST_LOADED:
                    self._loaded.pop(next(iter(self._loaded)), None)
        except (OSError, ValueError, csv.Error) as error:  # ValueError: it is no text
            raise _unreadable(path, error) from error
        content: T = loaded[1]
        return content

    def _read_progress(self, path: Path) -> list[dict[str, float | None]]:
        text = io.StringIO(read_file(path, _PROGRESS_BYTES, self._folder).decode(), newline="")
        # The last line may be half written.
        rows = [row for row in csv.DictReader(text) if None not in row and None not in row.values()]
        return [{name: _number(text) for name, text in row.items()} for row in thinned(rows)]


def _unreadable(path: Path, error: Exception) -> ConfigurationError:
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return ConfigurationError(f"cannot read {path}: {reason}")


def thinned(points: list[Any]) -> list[Any]:
    """Return at most ``MOST_POINTS`` of ``points``, evenly chosen, with the last one."""
    step = -(-len(points) // MOST_POINTS) or 1
    return points[::-1][::step][::-1]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _facts(episode: "EpisodeSummary") -> dict[str, Any]:
    names = ("id", "length", "return_", "seed", "lane", "endpoint", "policy_version", "ended_at")
    ends = ("terminated", "truncated")
    facts = {name: getattr(episode, name) for name in (*names, *ends)}
    return {**facts, "video": bool(episode.video)}


def _stamp(path: Path) -> tuple[int, int]:
    """Return mtime and size of a file; zeros where it is missing or may not be looked at."""
    try:
        status = path.lstat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
