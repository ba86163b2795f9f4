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
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmesh_ray.errors import ConfigurationError

if TYPE_CHECKING:  # endpoints of environments, which import the statistics, need no policies
    from rlmesh_ray.server.batch_schema import PredictionRequest

DEFAULT_MAX_ROWS = 1024


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


class BatchQueue:
    """Queues requests while the device is busy, and hands them out in batches when it is free.

    An item is a request, compared by identity. One with more than ``max_rows`` rows is a batch of
    its own: items are not split.

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
        self.waiting: dict[PredictionRequest, float] = {}
        """The items that wait, in order, with the time of their arrival."""
        self._busy_since_s: float | None = None
        self._free_since_s = -math.inf
        self._batches = self._items = self._rows = self._cancelled = 0
        self._waited_s = self._longest_wait_s = self._busy_s = 0.0

    def offer(self, item: "PredictionRequest", now_s: float) -> None:
        """Add an item at the end of the queue.

        Raises:
            ValueError: It has no rows, or waits already.
        """
        if not item.slots:
            raise ValueError("an item of 0 rows cannot be run")
        if item in self.waiting:
            raise ValueError("the item waits already")
        self.waiting[item] = now_s

    def cancel(self, item: "PredictionRequest") -> bool:
        """Remove an item from the queue; False: it does not wait (it runs, or is done)."""
        if self.waiting.pop(item, None) is None:
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
        if self._busy_since_s is not None or not self.waiting:
            return 0.0
        could_run_since_s = max(next(iter(self.waiting.values())), self._free_since_s)
        left_s = could_run_since_s + self._max_delay_s - now_s
        if left_s <= 0.0:
            return 0.0
        _, num_rows, routes = self._gather()
        return left_s if num_rows < self._max_rows and len(routes) < num_routes else 0.0

    def next_batch(self, now_s: float, num_routes: int = 0) -> "tuple[PredictionRequest, ...]":
        """Return the batch to run now; empty while one is running, or when no item waits.

        It is empty, too, while the batch waits for more items; see ``delay_left_s``. The device
        counts as busy until ``done``.
        """
        if self._busy_since_s is not None or not self.waiting:
            return ()
        if self._max_delay_s and self.delay_left_s(now_s, num_routes):
            return ()
        batch, _, _ = self._gather()
        for item in batch:
            wait_s = now_s - self.waiting.pop(item)
            self._waited_s += wait_s
            self._longest_wait_s = max(self._longest_wait_s, wait_s)
            self._rows += len(item.slots)
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
        return BatchQueueStatistics(
            items_waiting=len(self.waiting),
            rows_waiting=sum(len(item.slots) for item in self.waiting),
            is_busy=self._busy_since_s is not None,
            batches=self._batches,
            items=self._items,
            rows=self._rows,
            cancelled=self._cancelled,
            waited_s=self._waited_s,
            longest_wait_s=self._longest_wait_s,
            busy_s=self._busy_s,
        )

    def _gather(self) -> "tuple[list[PredictionRequest], int, set[str]]":
        """Return the next batch, its rows and those of the item that did not fit, and the routes.

        The routes are those of the items up to that one.
        """
        queue = iter(self.waiting)
        first = next(queue)
        batch, routes = [first], {first.route_key}
        group, num_rows = first.schema.group, len(first.slots)
        for item in queue:
            if item.route_key in routes:
                continue
            # Also for an item that is not taken: later items of its route must not overtake it.
            routes.add(item.route_key)
            if item.schema.group != group:
                continue
            num_rows += len(item.slots)
            if num_rows > self._max_rows:
                break
            batch.append(item)
        return batch, num_rows, routes
