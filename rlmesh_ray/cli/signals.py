"""Interrupts of a command by Ctrl-C and SIGTERM."""

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

INTERRUPTED = 130
"""Exit code of an interrupted command."""
_SAME_PRESS_S = 0.5


class Presses:
    """Tells presses of Ctrl-C apart from a signal that comes twice for one press.

    The terminal sends it to all programs of a command line, and ``make``, ``npm`` or ``docker``
    send it to theirs again.

    Args:
        now: Returns the time in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._last_s = -math.inf
        self.has_any = False
        """Whether one has come since this was set to False."""

    def is_new(self) -> bool:
        """Return whether a signal that has just come is a press of its own."""
        now_s = self._now()
        is_new = now_s - self._last_s > _SAME_PRESS_S
        if is_new:
            self._last_s = now_s
            self.has_any = True
        return is_new


_PRESSES = Presses()


@contextlib.contextmanager
def interrupt_on_sigterm(presses: Presses = _PRESSES) -> Iterator[None]:
    """Make SIGTERM raise KeyboardInterrupt, as Ctrl-C does, so that everything is cleaned up.

    A signal that comes twice for one press raises it once: the second would end the cleaning up.
    Code that a signal interrupts may lose it, such as an import or a destructor; see
    ``require_no_interrupt``.
    """
    presses.has_any = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        if presses.is_new():
            signal.default_int_handler(number, frame)

    with _handled_by(interrupt):
        yield


def require_no_interrupt(presses: Presses = _PRESSES) -> None:
    """Raise the KeyboardInterrupt of a signal that has come, if it was lost.

    Raises:
        KeyboardInterrupt: One has come.
    """
    if presses.has_any:
        raise KeyboardInterrupt


@contextlib.contextmanager
def interrupts_noted(
    note: Callable[[], None], presses: Presses = _PRESSES
) -> Iterator[Callable[[], bool]]:
    """Record the first Ctrl-C or SIGTERM; a second one raises KeyboardInterrupt.

    In the main thread only, like all signal handling of Python.

    Args:
        note: Called in the signal handler of the first one.
        presses: Tells the second one from the first one that comes again.

    Yields:
        A function that returns whether one has come.
    """
    has_come = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal has_come
        if not presses.is_new():
            return
        if has_come:
            signal.default_int_handler(number, frame)
        has_come = True
        note()

    with _handled_by(hold):
        yield lambda: has_come


@contextlib.contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # A shell's background jobs ignore Ctrl-C, and go on ignoring it.
            if callable(handler) or handler is signal.SIG_DFL:
                stack.callback(signal.signal, number, handler)
                signal.signal(number, handle)
        yield


@contextlib.contextmanager
def interrupts_held(presses: Presses = _PRESSES) -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is done.

    A second one is not delayed: the block may hang. An error of the block takes precedence.

    Raises:
        KeyboardInterrupt: One came in the block.
    """
    with interrupts_noted(lambda: None, presses) as has_come:
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
