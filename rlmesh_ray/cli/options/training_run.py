"""What a training is configured with: flags, settings and files, and its folder.

The folder keeps it all, so that ``--resume`` goes on with it. Hyperparameters are read as JSON or
YAML, never evaluated. A ``FILE.py`` is the exception: its function edits the config. It runs only
where the command names it, and never because a saved run does.
"""

import enum
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args, get_origin

import typer

from rlmesh_ray.cli.options.common import ENVIRONMENT, OUTPUT, flag
from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file
from rlmesh_ray.protocol.address import looks_like_address

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

DEFAULT_ALGO, DEFAULT_ITERS, DEFAULT_LANES = "PPO", 100, 8
TRAINING = "Training"
"""The group of options in --help."""
_RUN_FILE = "run.json"
_GOALS = ("stop_return", "stop_iters")
_CHANGEABLE = (*_GOALS, "checkpoint_every", "keep", "evaluate_every", "track")
_ALWAYS = frozenset(("env", "algo", "num_env_runners", "settings"))
# YAML 1.1, which PyYAML reads, takes 1e-4 for a text.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")
_SHOWN = {"env": "ENV_OR_ADDRESS", "settings": "--set and --config", "config_code": "--config"}


class Tracker(enum.StrEnum):
    """What the progress of a training is written for."""

    CSV = "csv"
    TENSORBOARD = "tensorboard"


@dataclass(frozen=True)
class TrainingRun:
    """What is trained on what, which the run's folder keeps; None: not given."""

    algo: str | None = flag(
        TRAINING,
        "An algorithm of RLlib: PPO, APPO, IMPALA, DQN or SAC.",
        metavar="NAME",
        show_default=DEFAULT_ALGO,
    )
    num_endpoints: int | None = flag(
        ENVIRONMENT,
        "Endpoints to start, for an id or a factory.",
        min=1,
        show_default="one a runner",
    )
    num_envs: int | None = flag(
        ENVIRONMENT,
        "Lanes of each session, for an id or a factory.",
        min=1,
        show_default=str(DEFAULT_LANES),
    )
    reset_threads: int | None = flag(
        ENVIRONMENT, "Lanes that reset at the same time.", min=1, show_default="1"
    )
    num_env_runners: int | None = flag(
        TRAINING,
        "EnvRunner actors of RLlib; 0: the driver samples.",
        min=0,
        show_default="0",
    )
    stop_return: float | None = flag(TRAINING, "Stop at this mean return.", metavar="RETURN")
    stop_iters: int | None = flag(
        TRAINING,
        "Stop after this many iterations, with those before --resume.",
        min=1,
        show_default=f"{DEFAULT_ITERS}, without --stop-return",
    )
    seed: int | None = flag(
        TRAINING,
        "Seed of everything that RLlib seeds; sessions then step together.",
        min=0,
        metavar="SEED",
    )
    evaluate_every: int | None = flag(
        TRAINING, "Evaluate every N iterations; keep the best.", min=1, show_default="never"
    )
    checkpoint_every: int | None = flag(
        OUTPUT, "Also write it every N iterations.", min=1, show_default="at the end only"
    )
    keep: int | None = flag(
        OUTPUT, "How many of the newest checkpoints to keep.", min=1, show_default="1"
    )
    track: list[Tracker] | None = flag(
        OUTPUT,
        "Write progress.csv, which is always written, or TensorBoard's files; repeatable.",
        show_default="csv",
    )
    env: str | None = None
    env_kwargs: dict[str, object] | None = None
    settings: dict[str, object] | None = None
    """Hyperparameters."""
    config_code: str | None = None
    """Text of the Python module of ``--config``."""

    @property
    def options(self) -> dict[str, Any]:
        return {name: each for name, each in asdict(self).items() if each is not None}


def write_run(folder: Path, run: TrainingRun) -> None:
    """Keep a training's options in its folder, which is made.

    Raises:
        ConfigurationError: They cannot be written, as on a full disk; former ones are kept.
    """
    partial = folder / f"{_RUN_FILE}.partial"
    with _written_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.unlink(missing_ok=True)
            with partial.open("x") as file:  # not through another user's link
                file.write(json.dumps(run.options, indent=2) + "\n")
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


def resumed_run(folder: Path, given: TrainingRun) -> TrainingRun:
    """Return a training that goes on: as its folder says, but for what may change.

    Args:
        folder: Folder of the training.
        given: What the command names.

    Raises:
        ConfigurationError: The folder holds no training, or an option contradicts it.
    """
    saved = _read(folder)
    own = saved.options
    refused = [
        f"{_SHOWN.get(name, '--' + name.replace('_', '-'))} was {_text(name, own.get(name))}"
        for name, value in given.options.items()
        if name not in _CHANGEABLE and not _agrees(name, value, own)
    ]
    if refused:
        raise ConfigurationError(
            f"the run in {folder} was configured in another way: {'; '.join(refused)}; leave this "
            "out to go on with it, or start another run without --resume"
        )
    if saved.config_code and given.config_code is None:
        raise ConfigurationError(
            f"the run in {folder} was configured by a Python file, which runs only where the "
            "command names it; give it again: --config FILE.py"
        )
    changed = {name: each for name, each in given.options.items() if name in (*_CHANGEABLE, "env")}
    if not changed.keys().isdisjoint(_GOALS):
        saved = replace(saved, stop_return=None, stop_iters=None)
    return replace(saved, **changed)


def _read(folder: Path) -> TrainingRun:
    kinds = {each.name: each.type for each in fields(TrainingRun)}
    try:
        saved: dict[str, Any] = json.loads(read_file(folder / _RUN_FILE, below=folder))
        if missing := _ALWAYS - saved.keys():
            raise ValueError(f"{_RUN_FILE} lacks {', '.join(sorted(missing))}")
        for name, value in saved.items():
            if name not in kinds or value is None or not _is(value, kinds[name]):
                raise ValueError(f"{name}={value!r:.40} is no option")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"{folder} holds no run of this version of train: {error}; name the --checkpoint-dir "
            f"of one, which has a {_RUN_FILE}"
        ) from error
    return TrainingRun(**saved)


def _is(value: object, kind: Any) -> bool:
    """Return whether a value of JSON has a field's type; a whole number is a float, too."""
    kinds = tuple(get_origin(each) or each for each in get_args(kind))
    return isinstance(value, (*kinds, int) if float in kinds else kinds)


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


def parse_settings(texts: Sequence[str] | None) -> dict[str, object]:
    """Return the settings of ``NAME=VALUE`` texts; the last one of a name counts.

    Raises:
        typer.BadParameter: A text has another form.
    """
    settings = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        if not name.strip() or not value.strip():
            raise typer.BadParameter(
                f"{text!r} is not NAME=VALUE, such as lr=1e-4 or grad_clip=null",
                param_hint="--set",
            )
        try:
            settings[name.strip()] = _value(value)
        except ValueError as error:
            raise typer.BadParameter(
                f"the value of {text!r} is neither JSON nor YAML ({_line(error)})",
                param_hint="--set",
            ) from error
    return settings


def read_settings_file(file: Path | None) -> dict[str, object]:
    """Return the settings in a YAML or JSON file; none without a file.

    Raises:
        ConfigurationError: The file cannot be read, or has another form.
    """
    if file is None:
        return {}
    try:
        settings = _value(read_file(file).decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} is neither JSON nor YAML ({_line(error)}); write lines such as 'lr: 0.0001'"
        ) from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ConfigurationError(
            f"{file} holds no names with values; write lines such as 'lr: 0.0001'"
        )
    return settings


def read_config_code(file: Path) -> str:
    """Return the text of a Python file that changes the config.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        return read_file(file).decode()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file} cannot be read as Python ({_line(error)}); save it as UTF-8"
        ) from error


def edited_config(file: Path, config: "AlgorithmConfig") -> "AlgorithmConfig":
    """Run a Python module; return what its function ``edit_config`` makes of the config.

    Raises:
        ConfigurationError: The module fails or has no such function, or that returns no config.
    """
    from ray import cloudpickle

    module = ModuleType(f"config_of_{file.stem}")  # a name that no package has
    sys.modules[module.__name__] = module
    sys.path.insert(0, str(file.resolve().parent))  # as `python FILE.py` does
    # Runners, and those who read the checkpoint, cannot import it.
    cloudpickle.register_pickle_by_value(module)
    try:
        exec(compile(read_file(file), file, "exec"), vars(module))
        edited: AlgorithmConfig = module.edit_config(config)
    except Exception as error:
        raise ConfigurationError(
            f"{file} fails with {type(error).__name__}: {_line(error)}; it has to define "
            "edit_config(config), which returns the config; --debug shows where it fails"
        ) from error
    if not isinstance(edited, type(config)):
        raise ConfigurationError(
            f"edit_config of {file} returned {edited!r:.80}; return the {type(config).__name__}"
        )
    return edited


def _value(text: str) -> Any:
    """Return the value of a JSON or YAML text; raises ValueError for any other text."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        import yaml
    except ModuleNotFoundError:  # it comes with Ray
        return text
    try:
        return _numbers(yaml.safe_load(text))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_numbers(part) for part in value]
    is_number = isinstance(value, str) and _EXPONENT.fullmatch(value)
    return float(value) if is_number else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
