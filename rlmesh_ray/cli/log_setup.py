"""What of the libraries' own chatter reaches the people: little, unless they ask for it."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from rlmesh_ray.cli.options.common import OUTPUT
from rlmesh_ray.server.log_context import ContextFilter
from rlmesh_ray.server.log_format import (
    FORMAT_VARIABLE,
    TEXT_FORMAT,
    LogFormat,
    formatter_of,
    log_to_stderr,
)

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

LogFormatOption = Annotated[
    LogFormat,
    typer.Option(
        "--log-format",
        envvar=FORMAT_VARIABLE,
        show_envvar=True,
        rich_help_panel=OUTPUT,
        help="Format of the log (warnings, sessions) on stderr.",
    ),
]


def set_up(*, is_debug: bool) -> None:
    """Show everything for debugging; else nothing: what matters comes as an error.

    To be called before gRPC is imported, which reads its setting once.
    """
    if is_debug:
        logging.basicConfig(level=logging.INFO, format=TEXT_FORMAT, stream=sys.stderr)
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # With no handler at all Python would print warnings on its own.
    for name in ("rlmesh_ray", "grpc"):
        logging.getLogger(name).addHandler(logging.NullHandler())


def show_log(log_format: LogFormat = LogFormat.TEXT) -> None:
    """Show this package's log on standard error; for servers, whose log is read."""
    if not is_verbose():
        log_to_stderr(log_format, with_sessions=True)
        return
    for handler in logging.getLogger().handlers:  # it shows everything already
        handler.addFilter(ContextFilter())
        handler.setFormatter(formatter_of(log_format))


def quiet_rllib(config: "AlgorithmConfig") -> None:
    """Keep RLlib's advice about itself away from the progress that people read."""
    if not is_verbose():
        # Both: the config's level holds from when the algorithm is built.
        logging.getLogger("ray.rllib").setLevel(logging.ERROR)
        config.debugging(log_level="ERROR")


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Keep warnings of all libraries back; for loading checkpoints, where RLlib has many."""
    if not is_verbose():
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def is_verbose() -> bool:
    """Tell whether everything is shown, for debugging."""
    return logging.getLogger().isEnabledFor(logging.INFO)
