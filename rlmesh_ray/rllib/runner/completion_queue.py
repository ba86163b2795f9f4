"""Where the work of a runner's slots ends up, for the one thread that samples.

Work that is done where somebody waits for it costs no thread: that of a slot that is alone, and
that whose end the system itself tells of, as the answer on a line. Everything else is done in the
slots' own threads, also what the system does not tell of for long: an endpoint that is frozen, as
containers and machines can be, tells nothing, and only whoever receives from it gives up in time.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.polling import AdaptivePoller, IdleWork, WakeupDescriptors, no_work

_MAX_WATCH_S = 1.0
"""What has been watched for so long without a signal is left to its owner."""

ResultT = TypeVar("ResultT")
Job = Callable[[], ResultT]


@dataclass(frozen=True, slots=True)
class _Watched(Generic[ResultT]):
    wakeup: WakeupDescriptors
    job: Job[ResultT]
    hand_back: Callable[[Job[ResultT]], None]
    late_s: float
    """When it is to be left, by ``time.monotonic``."""


class CompletionQueue(Generic[ResultT]):
    """One queue for all slots. For one thread that takes.

    Args:
        num_slots: That put something in.
    """

    def __init__(self, num_slots: int) -> None:
        self.are_deferred = num_slots == 1
        """Whether work that has no signal is done by whoever waits for it."""
        self._deferred: deque[Job[ResultT]] = deque()
        self._arrived: queue.SimpleQueue[ResultT] = queue.SimpleQueue()
        # By owner, the oldest first: a descriptor that was closed may be another one's by now.
        self._watched: dict[Hashable, _Watched[ResultT]] = {}
        self._signaled: deque[Hashable] = deque()
        """Owners of what is being watched and has told already."""
        self._own_eventfd = -1
        self._poller = AdaptivePoller(1.5e-3)
        self._eventfd_lock = threading.Lock()

    def defer(self, job: Job[ResultT]) -> None:
        """Have ``job`` done by ``take``."""
        self._deferred.append(job)

    def watch(
        self,
        wakeup: WakeupDescriptors,
        owner: Hashable,
        job: Job[ResultT],
        hand_back: Callable[[Job[ResultT]], None],
    ) -> None:
        """Have ``job`` done by ``take`` as soon as ``wakeup`` tells.

        Args:
            wakeup: Of what ``job`` would wait for.
            owner: Whose it is.
            job: It knows for how long to wait; a signal does not.
            hand_back: Gets ``job`` when ``wakeup`` has not told for a second, to do it elsewhere.
        """
        if self._own_eventfd < 0:
            # Whoever waits for descriptors must hear of threads as well.
            self._own_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        late_s = time.monotonic() + _MAX_WATCH_S
        self._watched[owner] = _Watched(wakeup, job, hand_back, late_s)

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` would not have to wait, as far as it has looked."""
        return bool(self._deferred or self._signaled) or not self._arrived.empty()

    def unwatch(self, owner: Hashable) -> Job[ResultT] | None:
        """Return what is being watched for ``owner``, and leave it to the caller."""
        watched = self._watched.pop(owner, None)
        if watched is None:
            return None
        if owner in self._signaled:
            self._signaled.remove(owner)
        return watched.job

    def put(self, arrival: ResultT) -> None:
        """Add an arrival. From any thread."""
        self._arrived.put(arrival)
        with self._eventfd_lock:
            if self._own_eventfd >= 0:
                os.eventfd_write(self._own_eventfd, 1)

    def take(self, timeout_s: float | None, meanwhile: IdleWork = no_work) -> ResultT | None:
        """Wait for the next arrival; None: nothing came in time.

        Args:
            timeout_s: None: as long as it takes.
            meanwhile: Done for as long as no signal tells and there is something to do.
        """
        if self._deferred:
            return self._deferred.popleft()()
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._watched and self._arrived.empty():
            if self._signaled:
                return self._watched.pop(self._signaled.popleft()).job()
            late_s = next(iter(self._watched.values())).late_s
            until_s = late_s if deadline_s is None else min(late_s, deadline_s)
            ready = self._readable(_left_s(until_s), meanwhile)
            self._signaled.extend(
                owner
                for owner, watched in self._watched.items()
                if watched.wakeup.eventfd in ready or watched.wakeup.peer in ready
            )
            now_s = time.monotonic()
            self._hand_back_late(now_s)
            if not ready and deadline_s is not None and now_s >= deadline_s:
                return None
        try:
            return self._arrived.get(timeout=_left_s(deadline_s))
        except queue.Empty:
            return None

    def _hand_back_late(self, now_s: float) -> None:
        """Leave what has not told for long, however often the others do."""
        if next(iter(self._watched.values())).late_s > now_s:
            return
        late = [owner for owner, watched in self._watched.items() if watched.late_s <= now_s]
        for owner in late:
            if owner not in self._signaled:
                watched = self._watched.pop(owner)
                watched.hand_back(watched.job)

    def close(self) -> None:
        """Let go of the descriptor. Idempotent; what is put in afterwards interests nobody."""
        with self._eventfd_lock:
            eventfd, self._own_eventfd = self._own_eventfd, -1
        if eventfd >= 0:
            os.close(eventfd)

    def _readable(self, timeout_s: float | None, meanwhile: IdleWork) -> list[int]:
        """Return what is readable; nothing: that took too long. The eventfd is quiet afterwards."""
        signals = [watched.wakeup for watched in self._watched.values()]
        ready = self._poller.wait_readable(
            self._own_eventfd,
            *(wakeup.eventfd for wakeup in signals),
            peers=[wakeup.peer for wakeup in signals],
            timeout_s=timeout_s,
            meanwhile=meanwhile,
        )
        if self._own_eventfd in ready:
            os.eventfd_read(self._own_eventfd)
        return ready


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
