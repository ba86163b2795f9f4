"""Logging of the command line: libraries are quiet, unless ``--debug`` is given."""

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rlmesh_ray.server.endpoint.log import LogFormat, formatter_of, log_to_stderr

if TYPE_CHECKING:
    from ray.rllib.algorithms.algorithm_config import AlgorithmConfig


def set_up(*, is_debug: bool) -> None:
    """Set up logging: all records with ``--debug``, else none; failures are raised as errors.

    Call this before gRPC is imported, which reads its variable once.
    """
    if is_debug:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(formatter_of(LogFormat.TEXT))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        return
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # Without a handler Python would print warnings itself.
    for name in ("rlmesh_ray", "grpc"):
        logging.getLogger(name).addHandler(logging.NullHandler())


def show_log(log_format: LogFormat = LogFormat.TEXT) -> None:
    if not is_verbose():
        log_to_stderr(log_format, with_sessions=True)
        return
    for handler in logging.getLogger().handlers:  # it has a handler already
        handler.setFormatter(formatter_of(log_format))


def quiet_rllib(config: "AlgorithmConfig") -> None:
    """Silence RLlib's warnings, which would interrupt the progress display."""
    if not is_verbose():
        # Both: the config's level counts only once the algorithm is built.
        logging.getLogger("ray.rllib").setLevel(logging.ERROR)
        config.debugging(log_level="ERROR")


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Silence warnings of all libraries; RLlib has many while a checkpoint loads."""
    if not is_verbose():
        logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


CLIENT_LOG = "rlmesh_ray.client.env.env_client"
"""Says that lanes take long to reset."""
RECORDING_LOG = "rlmesh_ray.recording"
"""Says what is not recorded, such as videos."""


class _SayingHandler(logging.Handler):
    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        # An error would end the thread that logs, which may have all deadlines of the process.
        with contextlib.suppress(OSError):
            self._say(record.getMessage())


@contextlib.contextmanager
def said(name: str, say: Callable[[str], None], level: int = logging.WARNING) -> Iterator[None]:
    """Have what a logger logs said to people, where the log itself is not shown.

    Args:
        name: Name of the logger.
        say: Gets each message.
        level: Of the records, or higher.
    """
    if is_verbose():
        yield
        return
    log, handler = logging.getLogger(name), _SayingHandler(say)
    former = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(former)


def is_verbose() -> bool:
    return logging.getLogger().isEnabledFor(logging.INFO)
