"""The one thread in which a policy runs.

It is not the serving loop's, so that a policy that hangs is seen from outside, and it is a
daemon, so that the interpreter does not wait for it when it ends.

Rule 1: calls and batches take turns: a flood of calls does not keep the batches waiting.
Rule 2: the thread fetches its next work itself. A round through the serving loop between two
batches would let the policy idle whenever the loop is busy.
Rule 3: at any time at most one thread is at work on the policy. This one is, but for what the
serving loop does itself (``try_run_inline``) while this one has nothing to do. Checks of contracts
that the policy allows beside its batches (``PolicyTraits.checks_concurrently``) have a thread like
this, too.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

Work = Callable[[], None]
"""Does not raise; if it does, that is logged, and the thread goes on."""


class PolicyThread:
    """Runs calls in the order in which they came, and a batch whenever there is one.

    Args:
        next_batch: Returns what to run next, None when nothing waits; called in the thread.
        name: Of the thread.
    """

    def __init__(
        self, next_batch: Callable[[], Work | None], name: str = "rlmesh-ray-policy"
    ) -> None:
        self._next_batch = next_batch
        self._calls: deque[Work] = deque()
        # A condition variable would cost three times as much a ring.
        self._wakeup: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._turn = threading.Lock()
        """Held by whoever is at work on the policy."""
        self._is_asleep = False
        self._is_ended = False
        self._busy_since_s: float | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether somebody is at work on the policy, here or elsewhere. From any thread."""
        return self._busy_since_s is not None

    @property
    def busy_for_s(self) -> float:
        """For how long it has been at its present work; 0.0 when it has none. From any thread."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def call(self, work: Work) -> None:
        """Have ``work`` run soon. From any thread."""
        self._calls.append(work)
        self.wake()

    def wake(self) -> None:
        """Say that there is something to do; costs next to nothing while it works."""
        if self._is_asleep:
            self._is_asleep = False
            self._wakeup.put(None)

    def try_run_inline(self, work: Work) -> bool:
        """Do ``work`` in the calling thread, unless there is other work; return whether it did."""
        if self._calls or not self._turn.acquire(blocking=False):
            return False
        try:
            self._do(work)
        finally:
            self._turn.release()
        return True

    def end(self) -> None:
        """Have it end after what it is doing; what waits is not done. Does not block."""
        self._is_ended = True
        self._wakeup.put(None)

    def _run(self) -> None:
        while not self._is_ended:
            if self._take_turn():
                continue
            self._is_asleep = True
            # What came before the flag was up has not rung. The other way round, a ring too many
            # costs one more look.
            if not self._take_turn():
                self._wakeup.get()
            self._is_asleep = False

    def _take_turn(self) -> bool:
        """Do one call and one batch; return whether there was any."""
        with self._turn:
            call = self._calls.popleft() if self._calls else None
            if call is not None:
                self._do(call)
            batch = self._next_batch()
            if batch is not None:
                self._do(batch)
        return call is not None or batch is not None

    def _do(self, work: Work) -> None:
        self._busy_since_s = time.monotonic()
        try:
            work()
        except BaseException:  # noqa: BLE001  # everybody else's work is still to be done
            _LOG.exception("the work of a policy has failed; please report this")
        finally:
            self._busy_since_s = None
