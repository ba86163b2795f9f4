"""A sender that delivers items in its own thread, and of waiting items only the latest."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """How many items were delivered, and how many were not."""

    delivered: int
    """Delivered items; empty ones are not counted."""
    superseded: int
    """Items that were replaced by a newer one before their delivery."""
    failed: int
    """Items for which ``deliver`` raised."""


class LatestOnlySender(Generic[T]):
    """Delivers one item at a time. Thread-safe.

    ``send`` never waits. The thread exists only while there are items; the interpreter waits for it
    at exit.

    Args:
        failure: The log message for a failed delivery, without its cause.
        deliver: Called in the sender's thread; returns False if the item is empty. An error that it
            raises is logged and counted.
    """

    def __init__(self, failure: str, deliver: Callable[[T], bool]) -> None:
        self._failure = failure
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._is_busy = False
        self._delivered = self._superseded = self._failed = 0
        self._last_failed = False

    def send(self, item: T) -> None:
        """Deliver ``item`` after the one in progress, if any, and instead of the one that waits."""
        with self._changed:
            self._superseded += len(self._waiting)
            self._waiting = [item]
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._run, name="rlmesh-ray-sender").start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until all items are delivered; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy, timeout_s)

    @property
    def last_failed(self) -> bool:
        """Whether the last delivery failed."""
        return self._last_failed

    def statistics(self) -> SenderStatistics:
        """Return the counters."""
        with self._changed:
            return SenderStatistics(self._delivered, self._superseded, self._failed)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._is_busy = False
                    self._changed.notify_all()
                    return
                item = self._waiting.pop()
            try:
                delivered, failed = int(self._deliver(item)), 0
            except Exception as error:  # noqa: BLE001  # the caller of send does not wait for it
                logger.warning("%s: %s: %s", self._failure, type(error).__name__, error)
                delivered, failed = 0, 1
            with self._changed:
                self._delivered += delivered
                self._failed += failed
                self._last_failed = failed > 0
