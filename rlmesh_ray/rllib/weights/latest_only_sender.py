"""Courier: hands things over in a thread of its own, and only the newest of those that wait."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """What has become of what was sent."""

    delivered: int
    """Without what turned out to be nothing."""
    superseded: int
    """Never delivered, because something newer came first."""
    failed: int
    """Not delivered, because ``deliver`` raised."""


class LatestOnlySender(Generic[T]):
    """Delivers one thing at a time. Safe to use from several threads.

    ``send`` never waits. There is a thread only while there is something to deliver; the
    interpreter does not end before it has.

    Args:
        what: What is delivered, for the log: "the weights".
        deliver: Called in the courier's thread; returns whether there was anything to deliver.
            What it raises is logged and counted.
    """

    def __init__(self, what: str, deliver: Callable[[T], bool]) -> None:
        self._cargo = what
        self._deliver = deliver
        self._changed = threading.Condition()
        self._waiting: list[T] = []
        self._is_busy = False
        self._delivered = self._superseded = self._failed = 0
        self._last_failed = False

    def send(self, thing: T) -> None:
        """Deliver ``thing``, now or after what is on its way, in place of what waits for that."""
        with self._changed:
            self._superseded += len(self._waiting)
            self._waiting = [thing]
            if self._is_busy:
                return
            self._is_busy = True
        threading.Thread(target=self._run, name="rlmesh-ray-courier").start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until nothing is left to deliver; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy, timeout_s)

    @property
    def last_failed(self) -> bool:
        """Whether what was tried last has not been delivered."""
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
                thing = self._waiting.pop()
            try:
                delivered, failed = int(self._deliver(thing)), 0
            except Exception as error:  # noqa: BLE001  # whoever sends does not wait for it
                logger.warning("%s: %s: %s", self._cargo, type(error).__name__, error)
                delivered, failed = 0, 1
            with self._changed:
                self._delivered += delivered
                self._failed += failed
                self._last_failed = failed > 0
