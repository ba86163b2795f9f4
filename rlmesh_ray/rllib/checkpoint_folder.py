"""The checkpoints of a training on disk: the newest, former ones, and the best."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.options import require_count

_PROGRESS = "training.json"


class CheckpointFolder:
    """Writes the checkpoints that are due after an iteration.

    Each is written beside the former one and renamed when it is complete: a process that is killed
    while it writes leaves the former one usable.

    Args:
        path: Of the newest checkpoint. A former one has its iteration behind the name, such as
            ``checkpoint-000010``; the best one is ``checkpoint-best``.
        every: After how many iterations one is written; None: only after the last one.
        keep: How many of the newest to keep.
        is_evaluated: Whether the returns of evaluations, not those of training, find the best.

    Raises:
        ConfigurationError: ``every`` or ``keep`` is below 1.
    """

    def __init__(self, path: Path, *, every: int | None, keep: int, is_evaluated: bool) -> None:
        require_count("checkpoint_every", 1 if every is None else every)
        require_count("keep", keep)
        self._path = path.resolve()
        self._every = every
        self._keep = keep
        self._is_evaluated = is_evaluated
        self._figure = "evaluation_return_mean" if is_evaluated else "return_mean"
        self._best = self._path.with_name(f"{path.name}-best")
        found = read_progress(self._best) if _is_complete(self._best) else []
        self._best_return = found[-1][self._figure] if found else math.nan

    def save(self, algorithm: Any, progress: list[dict[str, Any]], *, is_done: bool) -> bool:
        """Write what is due; return whether the newest checkpoint was.

        Args:
            algorithm: An Algorithm of RLlib.
            progress: The fields of ``TrainingProgress`` after each iteration.
            is_done: Whether this iteration was the last one.

        Raises:
            ConfigurationError: It cannot be written, as on a full disk.
        """
        last = progress[-1]
        is_due = is_done or (self._every is not None and last["iteration"] % self._every == 0)
        if is_due:
            partial = self._written(algorithm, progress)
            if _is_complete(self._path):
                number = read_progress(self._path)[-1]["iteration"]
                self._path.rename(self._path.with_name(f"{self._path.name}-{number:06d}"))
            partial.rename(self._path)
            for former in _former(self._path)[self._keep - 1 :]:
                shutil.rmtree(former)
        is_compared = self._is_evaluated or (is_due and self._every is not None)
        if is_compared and not math.isnan(last[self._figure]):
            self._save_best(algorithm, progress)
        return is_due

    def _save_best(self, algorithm: Any, progress: list[dict[str, Any]]) -> None:
        if progress[-1][self._figure] <= self._best_return:
            return
        partial = self._written(algorithm, progress)
        shutil.rmtree(self._best, ignore_errors=True)
        partial.rename(self._best)
        self._best_return = progress[-1][self._figure]

    def _written(self, algorithm: Any, progress: list[dict[str, Any]]) -> Path:
        partial = self._path.with_name(f"{self._path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            algorithm.save_to_path(str(partial))
            (partial / _PROGRESS).write_text(json.dumps(progress))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigurationError(
                f"the checkpoint in {self._path.parent} cannot be written ({error}); former ones "
                "are kept: free space, and go on with them (--resume), or name another folder"
            ) from error
        return partial


def newest_checkpoint(path: Path) -> Path:
    """Return a complete checkpoint: ``path``, or the former one if a kill came between two renames.

    Raises:
        ConfigurationError: There is none.
    """
    for candidate in (path.resolve(), *_former(path.resolve())):
        if _is_complete(candidate):
            return candidate
    raise ConfigurationError(
        f"{path} is no checkpoint that a training can go on from: it has no {_PROGRESS}; name one "
        "that train has written, or begin anew in another folder"
    )


def read_progress(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the fields of ``TrainingProgress`` after each iteration up to a checkpoint."""
    progress: list[dict[str, Any]] = json.loads((checkpoint / _PROGRESS).read_text())
    return progress


def _is_complete(path: Path) -> bool:
    return (path / _PROGRESS).is_file()


def _former(path: Path) -> list[Path]:
    """Return the former checkpoints, the newest first."""
    named = {each: each.name.removeprefix(f"{path.name}-") for each in path.parent.glob("*-*")}
    found = [each for each, number in named.items() if number.isdecimal() and _is_complete(each)]
    return sorted(found, key=lambda each: int(named[each]), reverse=True)
