"""Times the requests of a session, for dialects whose responses carry timings."""

import time

from rlmesh_ray.protocol.messages import EnvTimings


class RequestTimer:
    """Times the request in progress. As a context manager, it times the worker's part of it."""

    def __init__(self) -> None:
        self._arrived_ns = 0
        self._begun_ns = 0
        self._asked_ns: int | None = None
        self._replied_ns = 0

    def note_arrival(self) -> None:
        """Record that a request has been taken off the stream."""
        self._arrived_ns = time.perf_counter_ns()

    def begin(self) -> None:
        """Record that the request's turn has come."""
        self._begun_ns = time.perf_counter_ns()
        self._asked_ns = None

    def __enter__(self) -> None:
        """Record that the worker is asked; for one request that may be more than once."""
        if self._asked_ns is None:
            self._asked_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        """Record that the worker has replied."""
        self._replied_ns = time.perf_counter_ns()

    def timings(self) -> EnvTimings:
        """Return the times of the request up to now; the parts add up to the total.

        Only one request is taken off a stream at a time: those behind it wait with gRPC, unseen.
        """
        now_ns = time.perf_counter_ns()
        total_ns = now_ns - self._arrived_ns
        queue_ns = self._begun_ns - self._arrived_ns
        if self._asked_ns is None:
            return EnvTimings(total_ns, decode_ns=now_ns - self._begun_ns, queue_ns=queue_ns)
        return EnvTimings(
            total_ns,
            decode_ns=self._asked_ns - self._begun_ns,
            user_ns=self._replied_ns - self._asked_ns,
            encode_ns=now_ns - self._replied_ns,
            queue_ns=queue_ns,
        )
