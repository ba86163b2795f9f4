"""Hyperparameters from the command line and from files: read as JSON or YAML, never evaluated.

A ``FILE.py`` is the exception: its function edits the config. It runs only where the command names
it, and never because a saved run does.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import typer

from rlmesh_ray.errors import ConfigurationError
from rlmesh_ray.files import read_file

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

# YAML 1.1, which PyYAML reads, takes 1e-4 for a text.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


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
