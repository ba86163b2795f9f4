"""When the requests that have come to an endpoint are handed to its policy.

What the loop has received already would run in batches of one, if each request were handed over
by itself, and a batch costs as much as ten rows of a small network.
"""

import asyncio
from collections.abc import Callable

from rlmesh_ray.server.latency_gate import LatencyGate

_ENOUGH = 8
"""Predictions that wait for no others. To wait for more brought 32 routes nothing on two cores, and
the slowest hundredth of their answers took 3.7 times as long as at a server that does nothing, and
1.4 to 2.3 times with this (``bench serving --only latency``)."""


class BatchCollector:
    """Gathers the requests of all streams. To be used in the serving loop only.

    Args:
        latency_gate: The policy's.
        flush: Has the predictions run that have been asked for; called when no more of them
            come at once.
    """

    def __init__(self, latency_gate: LatencyGate, flush: Callable[[], None]) -> None:
        self.num_routes = 0
        """Routes that may ask, over all sessions; for whoever opens and ends them to count."""
        self.is_alone = False
        """Whether no other route could join what is being asked for now."""
        self._latency_gate = latency_gate
        self._flush = flush
        self._inbox: list[tuple[Callable[[bytes], None], bytes]] = []
        self._num_new = 0
        self._is_collecting = False

    def submit(self, take: Callable[[bytes], None], data: bytes) -> None:
        """Have ``take(data)`` called in the next round, or at once if nobody else can come.

        It must not raise: the others' would be lost. What has come at the same time is worked on
        in one go, whatever stream it came by: each piece of code that runs ten times on end is
        several times as fast as if all take turns.
        """
        self._inbox.append((take, data))
        if self._is_collecting:
            return
        if self.num_routes > 1:
            self.collect_soon()
        else:
            self._is_collecting = True
            self._collect()

    def note_request(self) -> None:
        """Note that a prediction has been asked for: what waits is to be handed over."""
        self._num_new += 1
        if not self._is_collecting:
            self.collect_soon()

    def collect_soon(self) -> None:
        """Hand over in the next round of the loop, with whatever will have come by then."""
        if not self._is_collecting:
            self._is_collecting = True
            asyncio.get_running_loop().call_soon(self._collect)

    def _collect(self) -> None:
        """Take what has come, and hand it over when that is enough or nothing more comes at once.

        When every route has asked, nothing more can come.
        """
        inbox, self._inbox = self._inbox, []
        self.is_alone = self.num_routes <= 1
        for take, data in inbox:
            take(data)
        self.is_alone = False
        if self._latency_gate.is_fast and inbox and self._num_new < min(self.num_routes, _ENOUGH):
            asyncio.get_running_loop().call_soon(self._collect)
            return
        self._is_collecting = False
        self._num_new = 0
        self._flush()
