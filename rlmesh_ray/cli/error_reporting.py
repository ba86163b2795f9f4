"""Errors in one line: the cause and the remedy."""

import errno
import os
import select
import traceback
from collections.abc import Iterator

from rlmesh_ray.errors import (
    AddressError,
    ConfigurationError,
    RemoteEnvError,
    RemoteModelError,
    RlmeshError,
)

_PEERS: dict[type[BaseException], str] = {
    RemoteEnvError: "the environment's endpoint answered ",
    RemoteModelError: "the model's endpoint answered ",
}


def describe(error: BaseException) -> tuple[str, str]:
    """Return the message for people, in one line, and the class of the error.

    Ray and RLlib wrap errors that cross processes; this describes the innermost error of ours.
    """
    inner = _own_error(error)
    if inner is None:
        name = type(error).__name__
        cause = _of_the_system(error) or f"unexpected {name}: {error}"
        return _one_line(f"{cause} (--debug shows where)"), name
    is_code = _remote_traceback(inner) and not getattr(inner, "is_wrong_usage", False)
    hint = " (--debug shows its traceback)" if is_code else ""
    kind = type(inner)
    return _one_line(_PEERS.get(kind, "") + str(inner) + hint), kind.__name__


def _of_the_system(error: BaseException) -> str:
    """Return what the system refuses, and why; empty where the error does not say so."""
    if isinstance(error, FileNotFoundError):
        try:
            os.getcwd()
        except FileNotFoundError:
            return "the current folder has been deleted; change to another one"
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"cannot access {error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return f"cannot write: {error.strerror}; make room, or write elsewhere"
    return ""


def is_reader_gone(error: BaseException) -> bool:
    """Return whether an error says that standard output has no reader: after ``| head -1``."""
    if not isinstance(error, BrokenPipeError):
        return False
    poller = select.poll()
    poller.register(1, 0)
    return any(events & select.POLLERR for _, events in poller.poll(0))


def exit_code(error: BaseException) -> int:
    """Return 2 where an argument or option is wrong, else 1: the command failed as it ran.

    The subclasses of ``ConfigurationError`` are failures: what the machine lacks, such as a free
    port or a package, and what endpoints or environments turn out to have.
    """
    own = _own_error(error)
    is_wrong_usage = type(own) in {ConfigurationError, AddressError}
    return 2 if is_wrong_usage or getattr(own, "is_wrong_usage", False) else 1


def _own_error(error: BaseException) -> BaseException | None:
    # Not isinstance: Ray's wrapper derives from both, and its text is a traceback.
    own = (each for each in _chain(error) if type(each).__module__ == RlmeshError.__module__)
    return next(own, None)


def trace(error: BaseException) -> str:
    """Return the traceback, with that of the other process, if the error has it."""
    parts = ["".join(traceback.format_exception(error))]
    shown = set()  # an error may repeat the traceback of its cause
    for inner in _chain(error):
        remote = _remote_traceback(inner)
        if remote and remote not in shown:
            shown.add(remote)
            parts.append(f"The other process reports:\n{remote}")
    return "\n".join(parts)


def _remote_traceback(error: BaseException) -> str:
    return getattr(error, "debug_info", "") or getattr(error, "traceback_text", "")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: object = error
    while isinstance(current, BaseException) and id(current) not in seen:
        seen.add(id(current))
        yield current
        # Ray stores the original in ``cause``.
        current = getattr(current, "cause", None) or current.__cause__


def _one_line(text: str) -> str:
    return " ".join(text.split())
