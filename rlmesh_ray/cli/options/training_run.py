"""Options of a training that its folder keeps, so that ``--resume`` goes on with them."""

import enum
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import typer

from rlmesh_ray.cli.options.common import OUTPUT, folder_option
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file
from rlmesh_ray.protocol.address import looks_like_address

TRAINING = "Training"
"""The group of options in --help."""
_RUN_FILE = "run.json"
_GOALS = ("stop_return", "stop_iters")
_CHANGEABLE = (*_GOALS, "checkpoint_every", "keep", "evaluate_every", "track")
_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {
    "env": str,
    "algo": str,
    "num_endpoints": int,
    "num_envs": int,
    "env_kwargs": dict,
    "reset_threads": int,
    "num_env_runners": int,
    "seed": int,
    "settings": dict,
    "config_code": str,
    "stop_return": _NUMBER,
    "stop_iters": int,
    "checkpoint_every": int,
    "keep": int,
    "evaluate_every": int,
    "track": list,
}
"""The options of a run, and what each may be in the file."""
_ALWAYS = frozenset(("env", "algo", "num_env_runners", "settings"))
_SHOWN = {"env": "ENV_OR_ADDRESS", "settings": "--set and --config", "config_code": "--config"}


class Tracker(enum.StrEnum):
    """What the progress of a training is written for."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"


def _count(name: str, group: str, description: str, default: str) -> Any:
    return typer.Option(name, min=1, rich_help_panel=group, help=description, show_default=default)


CheckpointEveryOption = Annotated[
    int | None,
    _count("--checkpoint-every", OUTPUT, "Also write it every N iterations.", "at the end only"),
]
KeepOption = Annotated[
    int | None, _count("--keep", OUTPUT, "How many of the newest checkpoints to keep.", "1")
]
EvaluateEveryOption = Annotated[
    int | None,
    _count("--evaluate-every", TRAINING, "Evaluate every N iterations; keep the best.", "never"),
]
TrackOption = Annotated[
    list[Tracker] | None,
    typer.Option(
        "--track",
        rich_help_panel=OUTPUT,
        help="Write progress.csv, which is always written, or TensorBoard's files; repeatable.",
        show_default="csv",
    ),
]
ResumeOption = Annotated[
    Path | None,
    folder_option("--resume", TRAINING, "Go on with the run in this folder, as it was configured."),
]


def write_run(folder: Path, options: Mapping[str, Any]) -> None:
    """Keep the options of a training in its folder, which is made.

    Raises:
        ConfigurationError: They cannot be written, as on a full disk; former ones are kept.
    """
    partial = folder / f"{_RUN_FILE}.partial"
    with _written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.unlink(missing_ok=True)
            with partial.open("x") as file:  # not through another user's link
                file.write(json.dumps(options, indent=2) + "\n")
            partial.replace(folder / _RUN_FILE)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other trainings from writing into a folder; a new one is not left if it stays empty.

    Raises:
        ConfigurationError: It cannot be written, or another training writes into it.
    """
    import fcntl  # late: Windows has none, and no Ray to train with

    is_new = not os.path.exists(folder)
    with _written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _written_to(folder), TemporaryFile(dir=folder):
            pass
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"another training writes into {folder}; wait for its end, or name another folder"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def _written_to(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{folder} cannot be written ({error}); free space, or allow writing there; a new run "
            "may have another --checkpoint-dir"
        ) from error


def resumed_run(folder: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a training that goes on: its own, but for those that may change.

    Args:
        folder: Folder of the training.
        given: The options of the command, by their names; None: not given.

    Raises:
        ConfigurationError: The folder holds no training, or an option contradicts it.
    """
    saved = _read(folder)
    refused = [
        f"{_SHOWN.get(name, '--' + name.replace('_', '-'))} was {_text(name, saved.get(name))}"
        for name, value in given.items()
        if value is not None and name not in _CHANGEABLE and not _agrees(name, value, saved)
    ]
    if refused:
        raise ConfigurationError(
            f"the run in {folder} was configured in another way: {'; '.join(refused)}; leave this "
            "out to go on with it, or start another run without --resume"
        )
    if saved.get("config_code") and given["config_code"] is None:
        raise ConfigurationError(
            f"the run in {folder} was configured by a Python file, which runs only where the "
            "command names it; give it again: --config FILE.py"
        )
    changed = {name: given[name] for name in (*_CHANGEABLE, "env") if given[name] is not None}
    if not changed.keys().isdisjoint(_GOALS):
        saved = {name: value for name, value in saved.items() if name not in _GOALS}
    return {**saved, **changed}


def _read(folder: Path) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = json.loads(read_file(folder / _RUN_FILE, below=folder))
        if missing := _ALWAYS - saved.keys():
            raise ValueError(f"{_RUN_FILE} lacks {', '.join(sorted(missing))}")
        for name, value in saved.items():
            if name not in _KINDS or not isinstance(value, _KINDS[name]):
                raise ValueError(f"{name}={value!r:.40} is no option")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{folder} holds no run of this version of train: {error}; name the --checkpoint-dir "
            f"of one, which has a {_RUN_FILE}"
        ) from error
    return saved


def _text(name: str, value: Any) -> str:
    if value is None:
        return "not given"
    return "another file" if name == "config_code" else json.dumps(value)


def _agrees(name: str, value: Any, saved: Mapping[str, Any]) -> bool:
    former: Any = saved.get(name)
    if name == "env" and looks_like_address(value):
        return looks_like_address(saved[name])  # the endpoint may have moved
    if name == "settings":
        return all(each in former and former[each] == wanted for each, wanted in value.items())
    return bool(value == former)
