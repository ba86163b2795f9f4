"""The thread in which a policy runs, its calls and batches, and the health that follows from it.

It is not the serving loop's thread, so a policy that hangs does not stop the endpoint. It is a
daemon, so the interpreter does not wait for it at exit.

Rule 1: calls and batches take turns: many calls do not delay the batches.
Rule 2: the thread fetches its next work itself. A round through the serving loop between two
batches would let the policy idle whenever the loop is busy.
Rule 3: at most one thread runs the policy at a time: this one, or the serving loop between
``begin_inline`` and ``end_inline``. Contract checks that a policy allows during its batches
(``PolicyTraits.checks_concurrently``) run in a separate ``PolicyThread``.
"""

import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

from rlmesh_ray.errors import PolicyError, RlmeshError
from rlmesh_ray.models.torch.threads import limit_torch_threads
from rlmesh_ray.server.endpoint.calls import text_of
from rlmesh_ray.server.endpoint.health import WATCH_PERIOD_S, Health
from rlmesh_ray.server.model.model_options import DEFAULT_STUCK_AFTER_S

_LOG = logging.getLogger(__name__)

_BLOCKED_REPORT_S = 2 * WATCH_PERIOD_S  # long enough for every Watch to see it

ResultT = TypeVar("ResultT")
_THREADS: "weakref.WeakSet[PolicyThread]" = weakref.WeakSet()
"""The threads that have not ended."""


def any_policy_runs() -> bool:
    """Return whether a policy of this process runs now, also one whose thread is closed.

    Native code that runs in its thread aborts the process when the interpreter ends: it comes back
    to an interpreter that is gone.
    """
    return any(thread.is_busy for thread in tuple(_THREADS))


def as_policy_error(error: BaseException) -> RlmeshError:
    """Return an RlmeshError as it was raised, or a PolicyError in place of anything else."""
    if isinstance(error, RlmeshError):
        return error
    failure = PolicyError(f"the policy raised {type(error).__name__}: {text_of(error)}")
    failure.__cause__ = error  # with its trace
    return failure


def _result_or_error(function: Callable[..., ResultT], *arguments: object) -> ResultT | RlmeshError:
    # A function, so that the frames of the error do not hold the future that gets it.
    try:
        return function(*arguments)
    except BaseException as error:  # noqa: BLE001  # the policy may raise anything
        return as_policy_error(error)


class PolicyThread:
    """Runs a policy's calls in arrival order, and a batch whenever one waits.

    Args:
        waiting: The requests that wait for a batch; without any, no batch runs.
        run_batch: Runs the next batch; returns False when none is to run now.
        name: Of the thread.
        stuck_after_s: After how many seconds at one batch, or one call, the policy counts as stuck.
        torch_threads: How many threads torch uses for a batch or a call.
    """

    def __init__(
        self,
        waiting: Collection[object] = (),
        run_batch: Callable[[], bool] = lambda: False,
        *,
        name: str = "rlmesh-ray-policy",
        stuck_after_s: float = DEFAULT_STUCK_AFTER_S,
        torch_threads: int = 1,
    ) -> None:
        self._stuck_after_s = stuck_after_s
        self._blocked_for_s = self._blocked_report_until_s = 0.0
        self.torch_threads = torch_threads
        self._waiting = waiting
        self._run_batch = run_batch
        self._calls: deque[Callable[[], None]] = deque()
        self._grouped: deque[Callable[[], None]] = deque()
        """Calls that one entry of ``_calls`` runs together."""
        self._futures: set[Future[Any]] = set()
        # A condition variable would cost three times as much per wake-up.
        self._wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        """Held by the thread that runs the policy."""
        self._is_woken = False
        """Whether the thread will look for work once more before it sleeps."""
        self._is_closed = False
        self._busy_since_s: float | None = None
        _THREADS.add(self)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether the policy runs now, in this thread or inline."""
        return self._busy_since_s is not None

    @property
    def busy_for_s(self) -> float:
        """Seconds since the policy's present work began; 0.0 when it has none."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def health(self) -> Health:
        busy_for_s = self.busy_for_s
        if busy_for_s > self._stuck_after_s:
            return Health(False, f"the policy has not come back for {busy_for_s:.0f} s")
        if time.monotonic() < self._blocked_report_until_s:
            return Health(
                False, f"the policy has just held all sessions for {self._blocked_for_s:.0f} s"
            )
        return Health(is_serving=True)

    def submit(
        self, function: Callable[..., ResultT], *arguments: object, is_grouped: bool = False
    ) -> Future[ResultT]:
        """Run ``function`` in the policy's thread; the future can be cancelled until it begins.

        The future raises an RlmeshError (see ``as_policy_error``). From any thread; grouped calls,
        which all run in one turn, only from the serving loop.
        """
        future: Future[ResultT] = Future()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            outcome = _result_or_error(function, *arguments)
            if isinstance(outcome, RlmeshError):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if not is_grouped:
            self._calls.append(work)
        else:
            # Callers do not wait before they make the next one, and only one turn stands between
            # two batches: the queue would grow without end.
            self._grouped.append(work)
            if len(self._grouped) == 1:  # else the call that is already queued runs it, too
                self._calls.append(self._run_grouped)
        self.wake()
        if self._is_closed:
            future.cancel()
        return future

    def wake(self) -> None:
        if not self._is_woken:
            self._is_woken = True
            self._wakeup.put(None)

    def begin_inline(self) -> bool:
        """Reserve the policy for the calling thread; False while other work runs or waits.

        After True, the caller runs the policy and calls ``end_inline``.
        """
        if self._calls or not self._lock.acquire(blocking=False):
            return False
        self._busy_since_s = time.monotonic()
        return True

    def end_inline(self) -> None:
        assert self._busy_since_s is not None, "begin_inline was called"
        now_s = time.monotonic()
        busy_for_s, self._busy_since_s = now_s - self._busy_since_s, None
        self._lock.release()
        if busy_for_s > self._stuck_after_s:
            # gRPC's health checks did not see it, since the serving loop did not run meanwhile.
            self._blocked_for_s = busy_for_s
            self._blocked_report_until_s = now_s + _BLOCKED_REPORT_S

    def close(self) -> None:
        """End the thread after its present work; waiting and later calls are cancelled."""
        self._is_closed = True
        self._wakeup.put(None)
        for future in tuple(self._futures):
            future.cancel()

    def _run_grouped(self) -> None:
        while self._grouped:
            self._grouped.popleft()()

    def _run(self) -> None:
        _result_or_error(limit_torch_threads, self.torch_threads)
        while not self._is_closed:
            self._wakeup.get()
            # Before it looks: work that comes from now on wakes it again.
            self._is_woken = False
            while not self._is_closed and self._take_turn():
                pass

    def _take_turn(self) -> bool:
        """Run a call and a batch, if there are any; return whether to look for more."""
        with self._lock:
            has_run = bool(self._calls)
            if has_run:
                self._do(self._calls.popleft())
            if self._waiting:  # read without the batcher's lock: new requests wake the thread
                has_run = self._do(self._run_batch) is not False or has_run
        return has_run and bool(self._calls or self._waiting)

    def _do(self, work: Callable[[], ResultT]) -> ResultT | None:
        self._busy_since_s = time.monotonic()
        try:
            return work()
        except BaseException:  # noqa: BLE001  # the work of the other sessions is still to be done
            _LOG.exception("the work of a policy has failed; please report this")
            return None
        finally:
            self._busy_since_s = None
