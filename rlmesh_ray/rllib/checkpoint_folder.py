"""The checkpoints of a training on disk: the newest, former ones, and the best."""

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file, require_plain_files
from rlmesh_ray.options import require_count

_PROGRESS = "training.json"
_COEFFICIENTS = "coefficients.json"
_LEARNT_COEFFICIENTS = (
    "curr_log_alpha",  # SAC, CQL, TQC
    "curr_kl_coeffs_per_module",  # PPO, APPO
    "moving_avg_sqd_adv_norms_per_module",  # MARWIL
)
"""Attributes of RLlib's learners, by module, that they change and leave out of checkpoints."""


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """The progress of a training after an iteration."""

    iteration: int
    """Number of the iteration, from 1."""
    env_steps: int
    """Steps sampled since the beginning."""
    env_steps_per_s: float
    """Rate in this iteration, learning included."""
    return_mean: float
    """Mean over the episodes of the latest iterations that hold 32; NaN until one has ended.

    RLlib's own figure is that of a single iteration, which may be one lucky episode.
    """
    episodes: int
    """Episodes ended since the beginning."""
    wall_s: float
    """Seconds since the beginning."""
    sessions_lost: int
    """Sessions lost since the beginning; each loss truncates the running episodes."""
    first_failure: str = ""
    """The first failure that truncated episodes of a runner, and its lanes; empty: none has."""
    evaluation_return_mean: float = math.nan
    """Mean return of the evaluation after this iteration; NaN: there was none."""


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
        self._best = _best(self._path)
        replaced = _replaced(self._best)
        if replaced.exists() and not self._best.exists():  # a kill came between two renames
            replaced.rename(self._best)
        found = _progress_in(self._best)
        self._best_return: float = getattr(found[-1], self._figure) if found else math.nan

    def save(self, algorithm: Any, progress: Sequence[TrainingProgress], *, is_done: bool) -> bool:
        """Write what is due; return whether the newest checkpoint was.

        Args:
            algorithm: An Algorithm of RLlib.
            progress: The progress after each iteration.
            is_done: Whether this iteration was the last one.

        Raises:
            ConfigurationError: It cannot be written, as on a full disk.
        """
        last = progress[-1]
        is_due = is_done or (self._every is not None and last.iteration % self._every == 0)
        if is_due:
            partial = self._written(algorithm, progress)
            if former := _progress_in(self._path):
                number = former[-1].iteration
                _rename(self._path, self._path.with_name(f"{self._path.name}-{number:06d}"))
            _rename(partial, self._path)
            for outdated in _former(self._path)[self._keep - 1 :]:
                shutil.rmtree(outdated)
        is_compared = self._is_evaluated or (is_due and self._every is not None)
        figure: float = getattr(last, self._figure)
        if is_compared and not math.isnan(figure) and not figure <= self._best_return:
            _rename(self._written(algorithm, progress), self._best)
            shutil.rmtree(_replaced(self._best), ignore_errors=True)
            self._best_return = figure
        return is_due

    def _written(self, algorithm: Any, progress: Sequence[TrainingProgress]) -> Path:
        coefficients: dict[str, Any] = next(iter(_foreach_learner(algorithm, _coefficients_of)), {})
        partial = self._path.with_name(f"{self._path.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            algorithm.save_to_path(str(partial))
            (partial / _COEFFICIENTS).write_text(json.dumps(coefficients))
            (partial / _PROGRESS).write_text(json.dumps([*map(asdict, progress)]))
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise ConfigurationError(
                f"the checkpoint in {self._path.parent} cannot be written ({error}); former ones "
                "are kept: free space, and go on with them (--resume), or name another folder"
            ) from error
        return partial


def related_checkpoints(path: Path) -> list[Path]:
    best = _best(path.resolve())
    return [*filter(Path.exists, (best, _replaced(best))), *_former(path.resolve())]


def newest_checkpoint(path: Path) -> tuple[Path, list[TrainingProgress]]:
    """Return the newest checkpoint that can be read, and the progress after each iteration.

    That is ``path``, or a former one if ``path`` is damaged, or if a kill came between two renames.

    Raises:
        ConfigurationError: There is none.
    """
    for candidate in (path.resolve(), *_former(path.resolve())):
        if progress := _progress_in(candidate):
            return candidate, progress
    is_damaged = (path / _PROGRESS).exists()
    cause = f"its {_PROGRESS} is damaged, or of another version" if is_damaged else ""
    raise ConfigurationError(
        f"{path} is no checkpoint that a training can go on from: "
        f"{cause or f'it has no {_PROGRESS}'}; name one that train has written, or begin anew in "
        "another folder"
    )


def restore(algorithm: Any, checkpoint: Path, env_steps: int) -> None:
    """Restore an algorithm from a checkpoint, with the coefficients that RLlib leaves out.

    Args:
        algorithm: An Algorithm of RLlib.
        checkpoint: One that a ``CheckpointFolder`` has written.
        env_steps: Steps sampled up to the checkpoint, for scheduled coefficients of the entropy.

    Raises:
        ConfigurationError: A file in it cannot be read.
    """
    saved: dict[str, dict[str, Any]] | None = None
    try:
        require_plain_files(checkpoint)
        with suppress(FileNotFoundError):  # written by an earlier version
            saved = json.loads(read_file(checkpoint / _COEFFICIENTS, below=checkpoint))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(
            f"{checkpoint} cannot be read ({error}); resume from another checkpoint"
        ) from error
    algorithm.restore_from_path(str(checkpoint))
    if saved is not None:
        _foreach_learner(algorithm, partial(_set_coefficients, saved=saved, env_steps=env_steps))


def _foreach_learner(algorithm: Any, function: Callable[[Any], Any]) -> list[Any]:
    group = getattr(algorithm, "learner_group", None)  # None on RLlib's old API stack
    found = [] if group is None else [each.get() for each in group.foreach_learner(function)]
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def _coefficients_of(learner: Any) -> dict[str, dict[str, Any]]:
    return {
        name: {module: value.tolist() for module, value in getattr(learner, name).items()}
        for name in _LEARNT_COEFFICIENTS
        if hasattr(learner, name)
    }


def _set_coefficients(learner: Any, saved: dict[str, dict[str, Any]], env_steps: int) -> None:
    for name in saved:
        for module, value in saved[name].items():
            coefficient = getattr(learner, name)[module]
            coefficient.data.copy_(coefficient.new_tensor(value))
    if hasattr(learner, "entropy_coeff_schedulers_per_module"):
        for module in learner.module.keys():  # noqa: SIM118  # a MultiRLModule is no dict
            learner.entropy_coeff_schedulers_per_module[module].update(timestep=env_steps)


def _progress_in(checkpoint: Path) -> list[TrainingProgress]:
    """Return the progress after each iteration up to a checkpoint; empty: it cannot be read."""
    try:
        saved = json.loads(read_file(checkpoint / _PROGRESS, below=checkpoint))
        return [TrainingProgress(**each) for each in saved]
    except (OSError, TypeError, ValueError, RecursionError):
        return []


def _former(path: Path) -> list[Path]:
    """Return the former checkpoints, damaged ones too, the newest first.

    Of other trainings' folders, such as ``ppo-2`` beside ``ppo``, none is named by as many digits
    and by the iteration that it holds.
    """
    named = {each: each.name.removeprefix(f"{path.name}-") for each in path.parent.glob("*-*")}
    found = [
        each
        for each, number in named.items()
        if re.fullmatch(r"\d{6,}", number) and not each.is_symlink() and (each / _PROGRESS).exists()
    ]
    own = [
        each
        for each in found
        if not (progress := _progress_in(each)) or progress[-1].iteration == int(named[each])
    ]
    return sorted(own, key=lambda each: int(named[each]), reverse=True)


def _best(path: Path) -> Path:
    return path.with_name(f"{path.name}-best")


def _rename(folder: Path, place: Path) -> None:
    """Rename a folder; contents of one that has the name are moved aside, not deleted."""
    if place.is_dir() and any(place.iterdir()):
        shutil.rmtree(_replaced(place), ignore_errors=True)
        place.rename(_replaced(place))
    folder.rename(place)


def _replaced(place: Path) -> Path:
    return place.with_name(f"{place.name}.replaced")
