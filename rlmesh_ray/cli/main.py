"""Entry point of ``rlmesh-ray``: its commands, and errors in one line."""

import contextlib
import enum
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from rlmesh_ray import __version__
from rlmesh_ray.cli.commands.bench import bench
from rlmesh_ray.cli.commands.check import check
from rlmesh_ray.cli.commands.compare import compare
from rlmesh_ray.cli.commands.evaluate import evaluate
from rlmesh_ray.cli.commands.export import export
from rlmesh_ray.cli.commands.inspect import inspect
from rlmesh_ray.cli.commands.pool import pool
from rlmesh_ray.cli.commands.register import register
from rlmesh_ray.cli.commands.serve_env import serve_env
from rlmesh_ray.cli.commands.serve_model import serve_model
from rlmesh_ray.cli.commands.status import status
from rlmesh_ray.cli.commands.train import train
from rlmesh_ray.cli.commands.watch import watch
from rlmesh_ray.cli.console import Console
from rlmesh_ray.cli.error_reporting import describe, exit_code, is_reader_gone, trace
from rlmesh_ray.cli.log_setup import set_up
from rlmesh_ray.cli.options.common import OUTPUT, DebugFlag, JsonFlag
from rlmesh_ray.cli.options.flags import as_command
from rlmesh_ray.cli.signals import INTERRUPTED, has_interrupt, interrupt_on_sigterm
from rlmesh_ray.options import removed_option

_METAVARS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "FILE"}
_LIKE_A_TYPO = 0.85
"""Least similarity of an option to suggest. Typer's own, 0.6, suggests --no-token for --token."""
_MOST_CHOICES = 20
"""Longest list of choices to show in place of a value; a longer one is put into the help."""


class ReadableCommand(TyperCommand):
    """A command."""

    def get_params(self, ctx: Any) -> Any:
        return [_readable(param) for param in super().get_params(ctx)]


class ReadableCommandGroup(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> Any:
        return [_readable(param) for param in super().get_params(ctx)]


def _readable(param: Any) -> Any:
    if param.param_type_name != "option":
        return param
    if param.name == "help":  # typer would show it first, in a group of its own
        param.rich_help_panel = OUTPUT
    if param.metavar is None:
        annotation = param.type_descriptor.annotation
        kind, *_ = get_args(annotation) or (annotation,)
        if get_origin(annotation) is Literal:
            _show_choices(param, list(get_args(annotation)))
        elif issubclass(kind, enum.Enum):
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


app = typer.Typer(cls=ReadableCommandGroup, pretty_exceptions_enable=False)
for command, examples in (
    (
        serve_env,
        (
            "CartPole-v1 --num-envs 8 --address 127.0.0.1:5555",
            "my_env:make --address 0.0.0.0:5555 --token-file token",
        ),
    ),
    (
        serve_model,
        ("runs/demo/checkpoint --address 127.0.0.1:5556", "my_policy:make --token-file token"),
    ),
    (
        export,
        ("runs/demo/checkpoint policy.onnx", "my_policy:make policy.onnx --env CartPole-v1"),
    ),
    (pool, ("games --address 0.0.0.0:7070 --token-file pool-token",)),
    (register, ("games@HEAD:7070 HOST:5555 --pool-token-file pool-token",)),
    (train, ("CartPole-v1 --algo DQN --set lr=1e-4", "--resume runs/cartpole --stop-return 300")),
    (
        evaluate,
        (
            "--env CartPole-v1 --model runs/demo/checkpoint",
            "--env HOST:5555 --model HOST:5556 --episodes 100 --seed 0",
        ),
    ),
    (compare, ("runs/old/checkpoint runs/demo/checkpoint --env CartPole-v1",)),
    (inspect, ("127.0.0.1:5555", "127.0.0.1:5555 --sessions")),
    (status, ("--watch", "--json")),
    (watch, ("ray", "127.0.0.1:5555 127.0.0.1:5556 --folder runs")),
    (check, ("127.0.0.1:5555", "127.0.0.1:5556 --env CartPole-v1")),
    (bench, ("CartPole-v1 --num-envs 8",)),
):
    name = command.__name__.replace("_", "-")
    lines = [f"rlmesh-ray {name} {example}" for example in examples]
    app.command(name, cls=ReadableCommand, epilog="\n".join(lines))(as_command(command))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", rich_help_panel=OUTPUT, help="Show the version."),
    ] = False,
    _json: JsonFlag = False,
    _debug: DebugFlag = False,
) -> None:
    """Environments anywhere, training and serving on Ray, one protocol between them."""
    console: Console = context.obj
    if version:
        console.event("version", version=__version__)
        console.say(f"rlmesh-ray {__version__}")
    elif context.invoked_subcommand is None:
        console.say(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit code: 0, 1 for an error, 2 for wrong usage.

    A command may have other exit codes, which its help lists.

    Args:
        arguments: Arguments without the program's name; default: those of the process.
    """
    return run(app, "rlmesh-ray", list(sys.argv[1:] if arguments is None else arguments))


def run(app: typer.Typer, program: str, words: Sequence[str]) -> int:
    """Run a command of ``app``, whose context object is a ``Console``; return the exit code."""
    console = Console(is_json="--json" in words)
    set_up(is_debug="--debug" in words)
    try:
        with interrupt_on_sigterm():
            code = app(list(words), prog_name=program, standalone_mode=False, obj=console)
    except typer.TyperException as error:
        console.error(_usage(error, program), "UsageError")
        return error.exit_code
    except Exception as error:  # noqa: BLE001  # the outermost frame: every error ends in one line
        if is_reader_gone(error):
            return 1
        if not has_interrupt(error):
            if "--debug" in words:
                console.trace(trace(error))
            console.error(*describe(error))
            return exit_code(error)
        code = INTERRUPTED
    except KeyboardInterrupt:  # between two calls of typer, which handles it within
        code = INTERRUPTED
    if code == INTERRUPTED:
        with contextlib.suppress(OSError):  # the reader is gone: Ctrl-C ends a whole pipeline
            console.event("interrupted")
            console.say("interrupted", style="yellow")
    return code if isinstance(code, int) else 0


def _usage(error: typer.TyperException, program: str) -> str:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else program
    unknown: Any = error  # an unknown option has the options that resemble it
    if getattr(error, "possibilities", None):
        unknown.possibilities = get_close_matches(
            unknown.option_name, unknown.possibilities, cutoff=_LIKE_A_TYPO
        )
    message = " ".join(error.format_message().split()).rstrip(".")
    if instead := removed_option(getattr(error, "option_name", "")):
        message = f"{message}: {instead}"
    message = message.replace(": Value error, ", ": ")  # pydantic's, with which typer reads choices
    return f"{message}; {command} --help shows the options"
