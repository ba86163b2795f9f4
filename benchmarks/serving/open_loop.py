"""Open loop: requests that arrive at scheduled times, whether the server is ready or not.

Latency counts from the moment a request was scheduled, not from when it could be sent. A server
that stalls delays all that arrive meanwhile, and each of them counts (no coordinated omission).
"""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.serving.arrivals import poisson
from benchmarks.serving.frames import Dialect
from benchmarks.serving.streams import BadAnswerError

_MAX_IN_FLIGHT = 256
"""Of one route; ids are unique among these. An arrival beyond waits, and its clock runs."""


class OpenRoute:
    """The requests of one route that are under way. One thread asks, another one is answered.

    Args:
        name: Of the route.
        rows: In each request.
        dialect: Of its server.
        write: Sends a frame, without waiting.
    """

    def __init__(
        self, name: str, rows: int, dialect: Dialect, write: Callable[[bytes], None]
    ) -> None:
        self.name = name
        self._write = write
        self._frames = itertools.cycle(
            [dialect.request(name, rows, f"{name}-{index}") for index in range(_MAX_IN_FLIGHT)]
        )
        self._lock = threading.Lock()
        self._due_s: deque[float] = deque()
        self._in_flight = 0

    def arrive(self, due_s: float) -> None:
        """Ask for what should have been asked for at ``due_s``, now or when the route is free."""
        with self._lock:
            self._due_s.append(due_s)
            self._send_next()

    def answered(self) -> float:
        """Take the oldest request for answered; return when it was due.

        A route's answers come in the order of its requests.

        Raises:
            BadAnswerError: Nothing was asked.
        """
        with self._lock:
            if not self._in_flight:
                raise BadAnswerError("an answer without a request")
            due_s = self._due_s.popleft()
            self._in_flight -= 1
            self._send_next()
        return due_s

    def unanswered(self) -> Sequence[float]:
        """Return when the requests were due that nothing has answered, the oldest first."""
        with self._lock:
            return tuple(self._due_s)

    def _send_next(self) -> None:
        # In the lock: who writes first was first to take a frame.
        if self._in_flight < min(len(self._due_s), _MAX_IN_FLIGHT):
            self._in_flight += 1
            self._write(next(self._frames))


class Arrival(NamedTuple):
    """A request that becomes due."""

    after_s: float
    """Since the beginning."""
    route: OpenRoute


def schedule(
    routes: Iterable[OpenRoute], *, rate_per_s: float, seconds: float, seed: int
) -> Sequence[Arrival]:
    """Return the arrivals at all routes in their order.

    Args:
        routes: With names that differ; each has a Poisson process of its own.
        rate_per_s: Of each.
        seconds: How long.
        seed: Of the gaps.
    """
    arrivals = (
        Arrival(after_s, route)
        for route in routes
        for after_s in poisson(rate_per_s, seconds, random.Random(f"{seed}/{route.name}"))
    )
    return sorted(arrivals, key=lambda arrival: arrival.after_s)
