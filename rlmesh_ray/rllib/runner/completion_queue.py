"""The queue of a runner's completed work, read by the thread that samples.

A job that runs in the reading thread needs no thread of its own: the job of the only slot, and one
whose end a file descriptor signals, such as the answer over a direct connection. All other jobs run
in the slots' own threads. So does a job whose descriptor has signaled nothing for a second: an
endpoint that is frozen never signals, and only the call that receives from it has a deadline.
"""

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.polling import AdaptivePoller, IdleWork, WakeupDescriptors, keep_cpu, no_work

_MAX_WATCH_S = 1.0
"""A job that was watched for so long without a signal is handed back to its owner."""

ResultT = TypeVar("ResultT")
Job = Callable[[], ResultT]


@dataclass(frozen=True, slots=True)
class _Watched(Generic[ResultT]):
    wakeup: WakeupDescriptors
    job: Job[ResultT]
    hand_back: Callable[[Job[ResultT]], None]
    late_s: float
    """When to hand it back, by ``time.monotonic``."""


class CompletionQueue(Generic[ResultT]):
    """One queue for all slots, read by one thread.

    Args:
        num_slots: How many slots put results in.
    """

    def __init__(self, num_slots: int) -> None:
        self.are_deferred = num_slots == 1
        """Whether jobs without a signal run in ``take``."""
        self._deferred: deque[Job[ResultT]] = deque()
        self._arrived: queue.SimpleQueue[ResultT] = queue.SimpleQueue()
        # By owner, the oldest first: the number of a closed descriptor may have been reused.
        self._watched: dict[Hashable, _Watched[ResultT]] = {}
        self._signaled: deque[Hashable] = deque()
        """Owners of watched jobs whose signal has arrived."""
        self._own_eventfd = -1
        # All workers wait for this thread. When it yielded its core to one of two workers on two
        # cores, it often got it back only after both had answered.
        self._poller = AdaptivePoller(1.5e-3, pause=keep_cpu)
        self._eventfd_lock = threading.Lock()

    def defer(self, job: Job[ResultT]) -> None:
        """Run ``job`` in the next ``take``."""
        self._deferred.append(job)

    def watch(
        self,
        wakeup: WakeupDescriptors,
        owner: Hashable,
        job: Job[ResultT],
        hand_back: Callable[[Job[ResultT]], None],
    ) -> None:
        """Run ``job`` in ``take`` as soon as ``wakeup`` signals.

        Args:
            wakeup: Signals that ``job`` need not wait.
            owner: Identifies the job; one job for each owner.
            job: Has a deadline of its own; a signal has none.
            hand_back: Gets ``job`` when ``wakeup`` has signaled nothing for a second, to run it in
                another thread.
        """
        if self._own_eventfd < 0:
            # A wait for descriptors must end when a thread puts a result in, too.
            self._own_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        late_s = time.monotonic() + _MAX_WATCH_S
        self._watched[owner] = _Watched(wakeup, job, hand_back, late_s)

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` would not have to wait, as far as it has looked."""
        return bool(self._deferred or self._signaled) or not self._arrived.empty()

    def unwatch(self, owner: Hashable) -> Job[ResultT] | None:
        """Return the job that is watched for ``owner``, which the caller runs from now on."""
        watched = self._watched.pop(owner, None)
        if watched is None:
            return None
        if owner in self._signaled:
            self._signaled.remove(owner)
        return watched.job

    def put(self, arrival: ResultT) -> None:
        """Add a result. From any thread."""
        self._arrived.put(arrival)
        with self._eventfd_lock:
            if self._own_eventfd >= 0:
                os.eventfd_write(self._own_eventfd, 1)

    def take(self, timeout_s: float | None, meanwhile: IdleWork = no_work) -> ResultT | None:
        """Wait for the next result; None: none arrived in time.

        Args:
            timeout_s: How long to wait; None: without limit.
            meanwhile: Called while no signal has arrived, until it returns False.
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
        """Hand back the jobs that were watched for too long."""
        if next(iter(self._watched.values())).late_s > now_s:
            return
        late = [owner for owner, watched in self._watched.items() if watched.late_s <= now_s]
        for owner in late:
            if owner not in self._signaled:
                watched = self._watched.pop(owner)
                watched.hand_back(watched.job)

    def close(self) -> None:
        """Close the descriptor. Idempotent; results that are put in afterwards are ignored."""
        with self._eventfd_lock:
            eventfd, self._own_eventfd = self._own_eventfd, -1
        if eventfd >= 0:
            os.close(eventfd)

    def _readable(self, timeout_s: float | None, meanwhile: IdleWork) -> list[int]:
        """Return the readable descriptors; none after the timeout. Resets the own eventfd."""
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
