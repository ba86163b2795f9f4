"""The queue of a runner's completed work, read by the thread that samples.

A job that runs in the reading thread needs no thread of its own: the job of the only owner, and one
whose end a file descriptor signals, such as the answer over a direct connection. All other jobs run
in a thread of their owner. So does a job whose descriptor has signaled nothing for a second: an
endpoint that is frozen never signals, and only the call that receives from it has a deadline.
"""

import os
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from rlmesh_ray.polling import AdaptivePoller, IdleWork, WakeupDescriptors, keep_cpu, no_work

_MAX_WATCH_S = 1.0
"""A job that was watched for so long without a signal runs in a thread."""

ResultT = TypeVar("ResultT")
Job = Callable[[], ResultT]


@dataclass(frozen=True, slots=True)
class _Watched(Generic[ResultT]):
    wakeup: WakeupDescriptors
    job: Job[ResultT]
    late_s: float
    """When to run it in a thread, by ``time.monotonic``."""


class CompletionQueue(Generic[ResultT]):
    """Runs the jobs of its owners, and returns their results. One thread submits and takes.

    Args:
        num_owners: How many owners submit jobs. The jobs of an only one run in ``take``.
    """

    def __init__(self, num_owners: int) -> None:
        self._is_shared = num_owners > 1
        # By owner, the oldest first: the number of a closed descriptor may have been reused.
        self._watched: dict[Hashable, _Watched[ResultT]] = {}
        self._ready: dict[Hashable, Job[ResultT]] = {}
        """By owner, the oldest first: the jobs that ``take`` runs."""
        self._arrived: queue.SimpleQueue[ResultT] = queue.SimpleQueue()
        """The results of jobs that have run in threads."""
        self._threads: dict[Hashable, queue.SimpleQueue[Job[ResultT] | None]] = {}
        self._num_in_thread: defaultdict[Hashable, int] = defaultdict(int)
        self._own_eventfd = -1
        # All workers wait for this thread. When it yielded its core to one of two workers on two
        # cores, it often got it back only after both had answered.
        self._poller = AdaptivePoller(1.5e-3, pause=keep_cpu)
        self._lock = threading.Lock()

    def submit(
        self,
        owner: Hashable,
        job: Job[ResultT],
        wakeup: WakeupDescriptors | None = None,
        *,
        in_background: bool = False,
    ) -> None:
        """Have a job run after the owner's earlier ones, and its result arrive in ``take``.

        It takes the place of a job of the owner whose end has not been taken: that one runs first,
        and its result is dropped.

        Args:
            owner: Identifies who submits it.
            job: Does not raise. It has its own deadline; a signal has none.
            wakeup: Signals that ``job`` need not wait; it then runs in ``take``.
            in_background: Whether it proceeds while no ``take`` waits for results.
        """
        if wakeup is not None:
            if self._own_eventfd < 0:
                # A wait for descriptors must end when a thread puts a result in, too.
                self._own_eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watched[owner] = _Watched(wakeup, job, time.monotonic() + _MAX_WATCH_S)
            return
        self.stop_watching(owner)
        before = self._ready.pop(owner, None)
        if before is not None:
            job = _after(before, job)
        if self._is_shared or in_background or self._num_in_thread[owner]:
            self._run_in_thread(owner, job)
        else:
            self._ready[owner] = job

    def stop_watching(self, owner: Hashable) -> None:
        """Run the job that is watched for an owner in the next ``take``: its signal is used up."""
        watched = self._watched.pop(owner, None)
        if watched is not None:
            self._ready[owner] = watched.job

    @property
    def is_ready(self) -> bool:
        """Whether ``take`` would not have to wait, as far as it has looked."""
        return bool(self._ready) or not self._arrived.empty()

    def take(self, timeout_s: float | None, meanwhile: IdleWork = no_work) -> ResultT | None:
        """Wait for the next result; None: none arrived in time.

        Args:
            timeout_s: How long to wait; None: without limit.
            meanwhile: Called while no signal has arrived, until it returns False.
        """
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while self._watched and not self._ready and self._arrived.empty():
            if not self._await_signals(deadline_s, meanwhile):
                return None
        if self._ready:
            return self._ready.pop(next(iter(self._ready)))()
        try:
            return self._arrived.get(timeout=_left_s(deadline_s))
        except queue.Empty:
            return None

    def _await_signals(self, deadline_s: float | None, meanwhile: IdleWork) -> bool:
        """Wait for descriptors, and sort the watched jobs; return False at the deadline."""
        watched = self._watched
        late_s = next(iter(watched.values())).late_s
        signaled = self._poller.wait_readable(
            self._own_eventfd,
            *[each.wakeup.eventfd for each in watched.values()],
            peers=[each.wakeup.peer for each in watched.values()],
            timeout_s=_left_s(late_s if deadline_s is None else min(late_s, deadline_s)),
            meanwhile=meanwhile,
        )
        if self._own_eventfd in signaled:
            os.eventfd_read(self._own_eventfd)
        now_s = time.monotonic()
        for owner, each in list(watched.items()):
            if each.wakeup.eventfd in signaled or each.wakeup.peer in signaled:
                self.stop_watching(owner)
            elif each.late_s <= now_s:
                self._run_in_thread(owner, watched.pop(owner).job)
        return bool(signaled) or deadline_s is None or now_s < deadline_s

    def close(self) -> None:
        """End the threads and close the descriptor. Idempotent; later results are ignored."""
        self._watched.clear()
        self._ready.clear()
        for jobs in self._threads.values():
            jobs.put(None)
        with self._lock:
            eventfd, self._own_eventfd = self._own_eventfd, -1
        if eventfd >= 0:
            os.close(eventfd)

    def _run_in_thread(self, owner: Hashable, job: Job[ResultT]) -> None:
        with self._lock:
            self._num_in_thread[owner] += 1
        jobs = self._threads.get(owner)
        if jobs is None:
            jobs = self._threads[owner] = queue.SimpleQueue()
            arguments = owner, jobs
            threading.Thread(
                target=self._run, args=arguments, name="rlmesh-ray-slot", daemon=True
            ).start()
        jobs.put(job)

    def _run(self, owner: Hashable, jobs: "queue.SimpleQueue[Job[ResultT] | None]") -> None:
        """Run an owner's jobs, in its thread."""
        while (job := jobs.get()) is not None:
            result = job()
            # Before its result is taken: the next job need not wait for this thread then.
            with self._lock:
                self._num_in_thread[owner] -= 1
                self._arrived.put(result)
                if self._own_eventfd >= 0:
                    os.eventfd_write(self._own_eventfd, 1)


def _after(first: Job[ResultT], then: Job[ResultT]) -> Job[ResultT]:
    def both() -> ResultT:
        first()
        return then()

    return both


def _left_s(deadline_s: float | None) -> float | None:
    return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
