"""Which waiting predictions run together: work-conserving, first come first served.

Rule 1: whenever the device is free and anything waits, a batch goes out. What arrives while it is
busy goes with the next one. Nothing ever waits for company, not even for a route that is about to
ask: so there are no timers here, and the clock serves the statistics alone.
Rule 2: the batch belongs to the item that has waited longest: it takes the others of its group
in arrival order, up to ``max_rows``, and stops at the first that does not fit.
Rule 3: a batch holds at most one item of a route, and never one that another of the same route
is waiting before.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.errors import ConfigurationError

T = TypeVar("T")

DEFAULT_MAX_ROWS = 1024


@dataclass(slots=True, eq=False)
class QueuedPrediction(Generic[T]):
    """One prediction that waits. Items are told apart by identity."""

    group: Hashable
    """Items of one group can run in one batch."""
    route_key: str
    num_rows: int
    """At least 1. More than ``max_rows`` is a batch of its own: items are not split."""
    payload: T


@dataclass(frozen=True, slots=True)
class BatcherStatistics:
    """What has happened since the batcher was made, and what waits now."""

    items_waiting: int
    rows_waiting: int
    is_busy: bool
    """Whether a batch is out; a served policy: whether it is at work."""
    batches: int
    """Handed out, the running one included; likewise the next two."""
    items: int
    rows: int
    cancelled: int
    """Items that were taken back before they ran."""
    waited_s: float
    """Time between arrival and batch, summed over all items that were handed out."""
    longest_wait_s: float
    busy_s: float
    """Time that finished batches took."""


class Batcher(Generic[T]):
    """Gathers items while the device is busy, and hands them out when it is free.

    Args:
        max_rows: Most rows in a batch of more than one item.

    Raises:
        ConfigurationError: ``max_rows`` is less than 1.
    """

    def __init__(self, *, max_rows: int) -> None:
        if max_rows < 1:
            raise ConfigurationError(f"max_rows is {max_rows}; a batch needs at least one row")
        self._max_rows = max_rows
        self._waiting: dict[QueuedPrediction[T], float] = {}
        self._busy_since_s: float | None = None
        self._batches = self._items = self._rows = self._cancelled = 0
        self._waited_s = self._longest_wait_s = self._busy_s = 0.0

    @property
    def num_waiting(self) -> int:
        """How many items wait."""
        return len(self._waiting)

    def offer(self, item: QueuedPrediction[T], now_s: float) -> None:
        """Add an item at the end of the queue.

        Raises:
            ValueError: It has no rows, or waits already.
        """
        if item.num_rows < 1:
            raise ValueError(f"an item of {item.num_rows} rows cannot be run")
        if item in self._waiting:
            raise ValueError("the item waits already")
        self._waiting[item] = now_s

    def cancel(self, item: QueuedPrediction[T]) -> bool:
        """Take an item back; False when it does not wait (it runs, or is done)."""
        if self._waiting.pop(item, None) is None:
            return False
        self._cancelled += 1
        return True

    def next_batch(self, now_s: float) -> tuple[QueuedPrediction[T], ...]:
        """Return what to run now; empty while a batch is out, or when nothing waits.

        The device counts as busy until ``done``.
        """
        if self._busy_since_s is not None or not self._waiting:
            return ()
        batch = self._gather()
        for item in batch:
            wait_s = now_s - self._waiting.pop(item)
            self._waited_s += wait_s
            self._longest_wait_s = max(self._longest_wait_s, wait_s)
            self._rows += item.num_rows
        self._batches += 1
        self._items += len(batch)
        self._busy_since_s = now_s
        return tuple(batch)

    def done(self, now_s: float) -> None:
        """Say that the batch has ended, well or badly: the device is free.

        Raises:
            ValueError: No batch is out.
        """
        if self._busy_since_s is None:
            raise ValueError("no batch is out")
        self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = None

    def passed_by(self, num_rows: int, took_s: float) -> None:
        """Count a batch of one item that was run without having waited here.

        Args:
            num_rows: Of the item.
            took_s: From its beginning to its end.
        """
        self._batches += 1
        self._items += 1
        self._rows += num_rows
        self._busy_s += took_s

    def statistics(self) -> BatcherStatistics:
        """Return a snapshot of the counters."""
        return BatcherStatistics(
            items_waiting=len(self._waiting),
            rows_waiting=sum(item.num_rows for item in self._waiting),
            is_busy=self._busy_since_s is not None,
            batches=self._batches,
            items=self._items,
            rows=self._rows,
            cancelled=self._cancelled,
            waited_s=self._waited_s,
            longest_wait_s=self._longest_wait_s,
            busy_s=self._busy_s,
        )

    def _gather(self) -> list[QueuedPrediction[T]]:
        queue = iter(self._waiting)
        first = next(queue)
        batch, num_rows, routes = [first], first.num_rows, {first.route_key}
        for item in queue:
            if item.route_key in routes:
                continue
            # Also a route whose item stays behind: its later ones must not overtake it.
            routes.add(item.route_key)
            if item.group != first.group:
                continue
            if num_rows + item.num_rows > self._max_rows:
                break
            batch.append(item)
            num_rows += item.num_rows
        return batch
