"""What interrupts a command, when, and how it is told from errors."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def interrupts_noted(note: Callable[[], None]) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM be noted, once; a second one raises KeyboardInterrupt.

    In the main thread only, as all that has to do with signals.

    Args:
        note: Called when the first one comes, wherever the program is just then.

    Yields:
        What tells whether one has come.
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
    """Let Ctrl-C and SIGTERM wait until the block is done: it happens whole or not at all.

    A second one does not wait: what the block writes to may never take it. What the block raises
    comes first.

    Raises:
        KeyboardInterrupt: One came in the block.
    """
    with interrupts_noted(lambda: None) as has_come:
        yield
    if has_come():
        raise KeyboardInterrupt


def has_interrupt(error: BaseException) -> bool:
    """Tell whether ``error`` came up while an interrupt was on its way out.

    One that hits a wait on a condition may leave it without its lock; the RuntimeError about that
    takes the place of the KeyboardInterrupt.
    """
    current: BaseException | None = error
    while current is not None and not isinstance(current, KeyboardInterrupt):
        current = current.__cause__ or current.__context__
    return current is not None
