"""What SIGTERM means to a command: the same as Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def has_interrupt(error: BaseException) -> bool:
    """Tell whether ``error`` came up while an interrupt was on its way out.

    One that hits a wait on a condition may leave it without its lock; the RuntimeError about that
    takes the place of the KeyboardInterrupt.
    """
    current: BaseException | None = error
    while current is not None and not isinstance(current, KeyboardInterrupt):
        current = current.__cause__ or current.__context__
    return current is not None
