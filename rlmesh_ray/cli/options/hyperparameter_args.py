"""Hyperparameters from the command line and from files: read as JSON or YAML, never evaluated."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from rlmesh_ray.errors import ConfigurationError

# YAML 1.1, which PyYAML reads, takes 1e-4 for a text.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def parse_settings(texts: Sequence[str] | None) -> dict[str, object]:
    """Return the settings of ``NAME=VALUE`` texts; the last one of a name counts.

    Raises:
        typer.BadParameter: A text has another form.
    """
    settings = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name.strip() or not equals:
            raise typer.BadParameter(
                f"{text!r} is not NAME=VALUE, such as lr=1e-4", param_hint="--set"
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
        settings = _value(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} is neither JSON nor YAML ({_line(error)})") from error
    if not isinstance(settings, dict) or not all(isinstance(name, str) for name in settings):
        raise ConfigurationError(
            f"{file} holds no names with values; write lines such as 'lr: 0.0001'"
        )
    return settings


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
