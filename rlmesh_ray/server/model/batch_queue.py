"""The queue of predictions, and which of them run in the next batch: first come first served.

Rule 1: it is work-conserving: whenever the policy is free and a request waits, a batch is handed
out. Requests that arrive while it is busy run in the next one. Only with a ``max_delay_s`` above 0
does a batch wait for more requests: no longer than that from the moment at which it could run, and
not once it is full or each route has a request. The queue has no timers: its caller asks again.
Rule 2: a batch begins with the request that has waited longest, and takes further ones of its group
in arrival order, up to ``max_rows``; it stops at the first that does not fit.
Rule 3: a batch holds at most one request of a route, and no request overtakes an earlier one of its
route.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a command's --help, which imports the default, needs no policies
    from rlmesh_ray.server.model.batch_schema import PredictionRequest

DEFAULT_MAX_ROWS = 1024


class BatchQueue:
    """Queues requests while the policy is busy, and hands them out in batches when it is free.

    One with more than ``max_rows`` rows is a batch of its own: requests are not split.

    Args:
        max_rows: Most rows in a batch of more than one request.
        max_delay_s: Longest time for which a batch that could run waits for more requests.
    """

    def __init__(self, *, max_rows: int, max_delay_s: float = 0.0) -> None:
        self._max_rows = max_rows
        self._max_delay_ns = round(max_delay_s * 1e9)
        self.waiting: dict[PredictionRequest, None] = {}
        """The requests that wait, in the order of their arrival."""
        self.free_since_ns = 0
        """When the last batch ended."""

    def delay_left_s(self, now_ns: int, num_routes: int) -> float:
        """Return for how many seconds the next batch waits for more requests; 0.0: for none.

        Args:
            now_ns: The present time, on the clock of the requests' arrivals.
            num_routes: How many routes could have a request.
        """
        if not self.waiting:
            return 0.0
        could_run_since_ns = max(next(iter(self.waiting)).arrived_ns, self.free_since_ns)
        left_ns = could_run_since_ns + self._max_delay_ns - now_ns
        if left_ns <= 0:
            return 0.0
        _, num_rows, routes = self._gather()
        return left_ns * 1e-9 if num_rows < self._max_rows and len(routes) < num_routes else 0.0

    def next_batch(self, now_ns: int, num_routes: int = 0) -> "list[PredictionRequest]":
        """Take the batch to run now; empty when no request waits, or the batch waits for more.

        To be called while the policy is free.
        """
        if not self.waiting or (self._max_delay_ns and self.delay_left_s(now_ns, num_routes)):
            return []
        batch, _, _ = self._gather()
        for request in batch:
            del self.waiting[request]
        return batch

    def _gather(self) -> "tuple[list[PredictionRequest], int, set[str]]":
        """Return the next batch, its rows and those of the one that did not fit, and the routes.

        The routes are those of the requests up to that one.
        """
        queue = iter(self.waiting)
        first = next(queue)
        batch, routes = [first], {first.route_key}
        group, num_rows = first.schema.group, len(first.slots)
        for request in queue:
            if request.route_key in routes:
                continue
            # Also for one that is not taken: later requests of its route must not overtake it.
            routes.add(request.route_key)
            if request.schema.group != group:
                continue
            num_rows += len(request.slots)
            if num_rows > self._max_rows:
                break
            batch.append(request)
        return batch, num_rows, routes
