"""Interrupts of a command by Ctrl-C and SIGTERM."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of an interrupted command."""


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def interrupts_noted(note: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C or SIGTERM; a second one raises KeyboardInterrupt.

    In the main thread only, like all signal handling of Python.

    Args:
        note: Called in the signal handler of the first one.

    Yields:
        A function that returns whether one has come.
    """
    has_come = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if has_come:
            signal.default_int_handler(number, frame)
        has_come = True
        note()

    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A shell's background jobs ignore Ctrl-C, and go on ignoring it.
            if callable(handler) or handler is signal.SIG_DFL:
                stack.callback(signal.signal, number, handler)
                signal.signal(number, hold)
        yield lambda: has_come


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is done.

    A second one is not delayed: the block may hang. An error of the block takes precedence.

    Raises:
        KeyboardInterrupt: One came in the block.
    """
    with interrupts_noted(lambda: None) as has_come:
        yield
    if has_come():
        raise KeyboardInterrupt


def has_interrupt(error: BaseException) -> bool:
    """Return whether a KeyboardInterrupt is ``error`` or one of its causes.

    An interrupt of a wait on a condition may leave it without its lock; the RuntimeError about that
    then replaces the KeyboardInterrupt.
    """
    current: BaseException | None = error
    while current is not None and not isinstance(current, KeyboardInterrupt):
        current = current.__cause__ or current.__context__
    return current is not None
