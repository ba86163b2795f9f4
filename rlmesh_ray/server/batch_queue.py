"""The queue of predictions, and which of them run in the next batch: first come first served.

Rule 1: it is work-conserving: whenever the device is free and an item waits, a batch is handed out.
Items that arrive while it is busy run in the next one. Only with a ``max_delay_s`` above 0 does a
batch wait for more items: no longer than that from the moment at which it could run, and not once
it is full or each route has an item. The queue has no timers: its caller asks again later.
Rule 2: a batch begins with the item that has waited longest, and takes further items of its group
in arrival order, up to ``max_rows``; it stops at the first that does not fit.
Rule 3: a batch holds at most one item of a route, and no item overtakes an earlier one of its
route.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from rlmesh_ray.errors import ConfigurationError

DEFAULT_MAX_ROWS = 1024


class QueuedItem(Protocol):
    """One prediction that waits. Items are compared by identity."""

    @property
    def group(self) -> Hashable:
        """Items of one group can run in one batch."""

    @property
    def route_key(self) -> str:
        """Names the item's route."""

    @property
    def num_rows(self) -> int:
        """At least 1. More than ``max_rows`` is a batch of its own: items are not split."""


ItemT = TypeVar("ItemT", bound=QueuedItem)


@dataclass(frozen=True, slots=True)
class BatchQueueStatistics:
    """Counters since the queue was made, and what it holds now."""

    items_waiting: int
    rows_waiting: int
    is_busy: bool
    """Whether a batch runs; of a served policy: whether the policy runs."""
    batches: int
    """Batches handed out, with the running one; ``items`` and ``rows`` likewise."""
    items: int
    rows: int
    cancelled: int
    """Items that were cancelled before they ran."""
    waited_s: float
    """Time between arrival and start, summed over all items that have started."""
    longest_wait_s: float
    busy_s: float
    """Total time of finished batches."""


class BatchQueue(Generic[ItemT]):
    """Queues items while the device is busy, and hands them out in batches when it is free.

    Args:
        max_rows: Most rows in a batch of more than one item.
        max_delay_s: Longest time for which a batch that could run waits for more items.

    Raises:
        ConfigurationError: ``max_rows`` is less than 1.
    """

    def __init__(self, *, max_rows: int, max_delay_s: float = 0.0) -> None:
        if max_rows < 1:
            raise ConfigurationError(f"max_rows is {max_rows}; a batch needs at least one row")
        self._max_rows = max_rows
        self._max_delay_s = max_delay_s
        self._waiting: dict[ItemT, float] = {}
        self._busy_since_s: float | None = None
        self._free_since_s = -math.inf
        self._batches = self._items = self._rows = self._cancelled = 0
        self._waited_s = self._longest_wait_s = self._busy_s = 0.0

    @property
    def num_waiting(self) -> int:
        """How many items wait."""
        return len(self._waiting)

    def offer(self, item: ItemT, now_s: float) -> None:
        """Add an item at the end of the queue.

        Raises:
            ValueError: It has no rows, or waits already.
        """
        if item.num_rows < 1:
            raise ValueError(f"an item of {item.num_rows} rows cannot be run")
        if item in self._waiting:
            raise ValueError("the item waits already")
        self._waiting[item] = now_s

    def cancel(self, item: ItemT) -> bool:
        """Remove an item from the queue; False: it does not wait (it runs, or is done)."""
        if self._waiting.pop(item, None) is None:
            return False
        self._cancelled += 1
        return True

    def delay_left_s(self, now_s: float, num_routes: int) -> float:
        """Return for how many seconds the next batch waits for more items; 0.0: it waits for none.

        It is 0.0, too, while a batch is running, or when no item waits.

        Args:
            now_s: The present time.
            num_routes: How many routes could have an item.
        """
        if self._busy_since_s is not None or not self._waiting:
            return 0.0
        could_run_since_s = max(next(iter(self._waiting.values())), self._free_since_s)
        left_s = could_run_since_s + self._max_delay_s - now_s
        if left_s <= 0.0:
            return 0.0
        _, num_rows, routes = self._gather()
        return left_s if num_rows < self._max_rows and len(routes) < num_routes else 0.0

    def next_batch(self, now_s: float, num_routes: int = 0) -> tuple[ItemT, ...]:
        """Return the batch to run now; empty while one is running, or when no item waits.

        It is empty, too, while the batch waits for more items; see ``delay_left_s``. The device
        counts as busy until ``done``.
        """
        if self._busy_since_s is not None or not self._waiting:
            return ()
        if self._max_delay_s and self.delay_left_s(now_s, num_routes):
            return ()
        batch, _, _ = self._gather()
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
        """Note that the batch has ended, with or without an error: the device is free.

        Raises:
            ValueError: No batch is running.
        """
        if self._busy_since_s is None:
            raise ValueError("no batch is running")
        self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = None
        self._free_since_s = now_s

    def passed_by(self, num_rows: int, took_s: float) -> None:
        """Count a batch of one item that ran without having been queued.

        Args:
            num_rows: Rows of the item.
            took_s: Duration of the batch.
        """
        self._batches += 1
        self._items += 1
        self._rows += num_rows
        self._busy_s += took_s

    def statistics(self) -> BatchQueueStatistics:
        """Return a snapshot of the counters."""
        return BatchQueueStatistics(
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

    def _gather(self) -> tuple[list[ItemT], int, set[str]]:
        """Return the next batch, its rows and those of the item that did not fit, and the routes.

        The routes are those of the items up to that one.
        """
        queue = iter(self._waiting)
        first = next(queue)
        batch, group, num_rows, routes = [first], first.group, first.num_rows, {first.route_key}
        for item in queue:
            if item.route_key in routes:
                continue
            # Also for an item that is not taken: later items of its route must not overtake it.
            routes.add(item.route_key)
            if item.group != group:
                continue
            num_rows += item.num_rows
            if num_rows > self._max_rows:
                break
            batch.append(item)
        return batch, num_rows, routes
