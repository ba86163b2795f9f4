"""The log of this package: the endpoint and the session that a record belongs to, and its format.

The code that serves a session enters its context (``enter``, ``logged_as``); the formatters write
the names of the endpoint and of the session into the records that are logged there.

A session's name in the log is not its id: a client that knows the id of an open session may call
into its lanes, or fetch its shared memory. ``short_name`` cannot be turned back into it.
"""

import contextlib
import datetime
import enum
import hashlib
import json
import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TextIO

from rlmesh_ray.errors import ConfigurationError, printable

# --- the endpoint and the session that a record belongs to -------------------------------------

_NAME_CHARACTERS = 8
_NAMES: ContextVar[tuple[str, str]] = ContextVar("rlmesh_ray_names", default=("", ""))


def new_endpoint_id() -> str:
    return secrets.token_hex(_NAME_CHARACTERS // 2)


def short_name(session_id: str) -> str:
    """Return the name of a session in the log; a drawn one where the protocol has no ids."""
    if not session_id:
        return secrets.token_hex(_NAME_CHARACTERS // 2)
    return hashlib.sha256(session_id.encode()).hexdigest()[:_NAME_CHARACTERS]


def enter(endpoint_id: str, session: str) -> None:
    """Have records carry these names from now on, in this task and in those that it begins."""
    _NAMES.set((endpoint_id, session))


def current() -> tuple[str, str]:
    """Return the names that records carry now: of the endpoint, of the session.

    For code of a session that runs outside of its task, such as timers.
    """
    return _NAMES.get()


@contextlib.contextmanager
def logged_as(endpoint_id: str, session: str = "") -> Iterator[None]:
    former = _NAMES.set((endpoint_id, session))
    try:
        yield
    finally:
        _NAMES.reset(former)


def facts(event: str, **fields: object) -> dict[str, dict[str, object]]:
    """Return what a record says to programs, as ``extra`` of the call that logs it.

    ``event`` is a word that does not change; the fields are anything that JSON can express.
    """
    return {"facts": {"event": event, **fields}}


# --- lines on standard error -------------------------------------------------------------------

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

    Text has warnings, and ``with_sessions`` the begin and end of sessions, their slow resets, and
    the server's end; JSON has all events of sessions.
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
    """Log to standard error in the format that an environment variable names; for actors."""
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
