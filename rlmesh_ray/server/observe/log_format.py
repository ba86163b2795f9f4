"""The format of this package's log on standard error: lines for people, or JSON for programs."""

import datetime
import enum
import json
import logging
import os
import sys
from typing import TextIO

from rlmesh_ray.errors import ConfigurationError, printable
from rlmesh_ray.server.endpoint.log_context import current

FORMAT_VARIABLE = "RLMESH_RAY_LOG_FORMAT"
TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PACKAGE = "rlmesh_ray"


class LogFormat(enum.StrEnum):
    """The format of the log."""

    TEXT = "text"
    """For people: warnings and errors; the commands also show how sessions begin and end, and slow
    resets."""
    JSON = "json"
    """One object a line, also for the begin and end of each session."""


def log_to_stderr(log_format: LogFormat, *, with_sessions: bool = False) -> None:
    """Write this package's records to standard error; the last call counts.

    Args:
        log_format: Format of a line: text has warnings, JSON also the events of sessions.
        with_sessions: Whether text has the begin and end of sessions, their slow resets, and the
            server's end, too.
    """
    logger = logging.getLogger(_PACKAGE)
    for former in [one for one in logger.handlers if isinstance(one, _Handler)]:
        logger.removeHandler(former)
    handler = _Handler()
    is_text = log_format is LogFormat.TEXT
    level = logging.WARNING if is_text and not with_sessions else logging.INFO
    if is_text and with_sessions:
        handler.addFilter(
            lambda record: record.levelno >= logging.WARNING or _is_of_lifetime(record)
        )
    handler.setLevel(level)
    handler.setFormatter(formatter_of(log_format))
    logger.addHandler(handler)
    if logger.getEffectiveLevel() > level:
        logger.setLevel(level)


def formatter_of(log_format: LogFormat) -> logging.Formatter:
    return JsonFormatter() if log_format is LogFormat.JSON else TextFormatter(TEXT_FORMAT)


def configure_logging_from_environment() -> None:
    """Log to standard error in the format that an environment variable names; for actors.

    Raises:
        ConfigurationError: The variable names an unknown format.
    """
    named = os.environ.get(FORMAT_VARIABLE)
    if not named:
        return
    try:
        log_format = LogFormat(named)
    except ValueError:
        choices = ", ".join(LogFormat)
        raise ConfigurationError(f"{FORMAT_VARIABLE}={named!r} is not one of {choices}") from None
    log_to_stderr(log_format)


def _is_of_lifetime(record: logging.LogRecord) -> bool:
    event = getattr(record, "facts", {}).get("event")
    return event in ("session_begins", "session_ends", "resetting", "stopped")


class _Handler(logging.StreamHandler):  # type: ignore[type-arg]  # generic for type checkers only
    """This package's handler; writes to the current ``sys.stderr``.

    The live line of a terminal replaces that, so that records are printed above the line.
    """

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, _stream: TextIO) -> None:
        """Keep it: the base class sets its own."""


class TextFormatter(logging.Formatter):
    """``time level logger: message [endpoint … session …]``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines, printable; all but the first one are indented."""
        return printable(super().format(record)).replace("\n", "\n  ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        endpoint_id, session = current()
        if not endpoint_id:
            return line
        return f"{line} [endpoint {endpoint_id}{session and f' session {session}'}]"


class JsonFormatter(logging.Formatter):
    """One object: time (UTC), level, logger, message, endpoint_id, session, error if there is."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object, in one line."""
        endpoint_id, session = current()
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "endpoint_id": endpoint_id,
            "session": session,
        }
        fields |= getattr(record, "facts", {})
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
