"""Readable ``--help``: names of values in place of the Python types that typer shows."""

import enum
from pathlib import Path
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from rlmesh_ray.cli.options.common import OUTPUT

_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "FILE"}
_MOST_CHOICES = 20
"""Longest list of choices to show in place of a value; a longer one is put into the help."""


class ReadableCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> Any:
        """Return all options and arguments, also ``--help``, as the help shows them."""
        return [_readable(param) for param in super().get_params(ctx)]


class ReadableCommandGroup(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> Any:
        """Return all options and arguments, also ``--help``, as the help shows them."""
        return [_readable(param) for param in super().get_params(ctx)]


def _readable(param: Any) -> Any:
    """Return an option with a metavar, and in a group."""
    if param.param_type_name != "option":
        return param
    if param.name == "help":  # typer would show it first, in a group of its own
        param.rich_help_panel = OUTPUT
    if param.metavar is None:
        annotation = param.type_descriptor.annotation
        kind, *_ = get_args(annotation) or (annotation,)
        if issubclass(kind, enum.Enum):
            _show_choices(param, [str(choice.value) for choice in kind])
        else:
            param.metavar = _METAVARS[kind]
    return param


def _show_choices(param: Any, choices: list[str]) -> None:
    text = "|".join(choices)
    if param.multiple or len(text) > _MOST_CHOICES:
        param.metavar = "NAME"
        param.help = f"{param.help} One of {', '.join(choices)}."
    else:
        param.metavar = text
