"""Errors in one line: the cause and the remedy."""

import traceback
from collections.abc import Iterator

from rlmesh_ray.errors import RemoteEnvError, RemoteModelError, RlmeshError

_PEERS: dict[type[BaseException], str] = {
    RemoteEnvError: "the environment's endpoint answered ",
    RemoteModelError: "the model's endpoint answered ",
}


def describe(error: BaseException) -> tuple[str, str]:
    """Return the message for people, in one line, and the class of the error.

    Ray and RLlib wrap errors that cross processes; this describes the innermost error of ours.
    """
    for inner in _chain(error):
        # Not isinstance: Ray's wrapper derives from both, and its text is a traceback.
        if type(inner).__module__ == RlmeshError.__module__:
            kind = type(inner)
            hint = " (--debug shows its traceback)" if getattr(inner, "debug_info", "") else ""
            return _one_line(_PEERS.get(kind, "") + str(inner) + hint), kind.__name__
    name = type(error).__name__
    return _one_line(f"unexpected {name}: {error} (--debug shows where)"), name


def trace(error: BaseException) -> str:
    """Return the traceback, with that of the other process, if the error has it."""
    parts = ["".join(traceback.format_exception(error))]
    shown = set()  # an error may repeat the traceback of its cause
    for inner in _chain(error):
        remote = getattr(inner, "debug_info", "") or getattr(inner, "traceback_text", "")
        if remote and remote not in shown:
            shown.add(remote)
            parts.append(f"The other process reports:\n{remote}")
    return "\n".join(parts)


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
