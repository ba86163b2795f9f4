"""How tests wait for what other processes and threads do; tests in all folders use this."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # environments of peers, which use this, too, have no pytest
    import pytest

# What is waited for runs on the same few cores, or in this very process: who looks without a pause
# keeps a core and the interpreter's lock from it.
_PAUSE_S = 0.01
WRITER_S = 240.0
"""For what the writer of a recording does: busy cores hardly run it, since it gives way to all."""


def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> bool:
    """Return whether ``condition`` has come true in time; it may be looked at often."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def entered(
    monkeypatch: "pytest.MonkeyPatch", owner: object, name: str, by: threading.Thread | None = None
) -> threading.Event:
    """Return what is set as soon as a method is called, by one thread or by any.

    To look at other threads' stacks may stop the whole process: Python 3.11 waits for a lock there
    that it holds (github.com/python/cpython/issues/106883).
    """
    event = threading.Event()
    method = getattr(owner, name)

    @functools.wraps(method)
    def noting(*arguments: Any, **named: Any) -> Any:
        if by in {None, threading.current_thread()}:
            event.set()
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, noting)
    return event


@contextlib.contextmanager
def interrupted_when_locked(nth: int = 1) -> Iterator[None]:
    """Raise KeyboardInterrupt where the handler of a signal may, in this thread.

    The place is in the nth Condition that it locks: the lock is taken, and ``with`` has not begun.
    """
    left = nth

    def interrupt(frame: Any, event: str, _: object) -> None:
        nonlocal left
        if event == "c_return" and frame.f_code is threading.Condition.__enter__.__code__:
            left -= 1
            if not left:
                raise KeyboardInterrupt  # which ends the profiling

    sys.setprofile(interrupt)
    try:
        yield
    finally:
        sys.setprofile(None)
