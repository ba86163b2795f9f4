"""What a policy is asked beside predictions: calls into its thread, each with an outcome."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.server.batch_runner import result_or_error
from rlmesh_ray.server.policy_thread import PolicyThread, Work

ResultT = TypeVar("ResultT")


class PolicyExecutor:
    """Calls that take turns with the policy's batches. To be used from any thread.

    Args:
        thread: The policy's.
    """

    def __init__(self, thread: PolicyThread) -> None:
        self._thread = thread
        self._open: set[Future[Any]] = set()
        self._joint: deque[Work] = deque()
        self._is_closed = False

    def submit(self, function: Callable[..., ResultT], *arguments: object) -> Future[ResultT]:
        """Run ``function`` in the policy's thread; it may be cancelled until it begins.

        What it raises is an RlmeshError: the policy's own, or a PolicyError for anything else.
        """
        return self._made(self._thread.call, function, *arguments)

    def submit_grouped(
        self, function: Callable[..., ResultT], *arguments: object
    ) -> Future[ResultT]:
        """Run ``function`` in one turn with all such calls that wait then; from the serving loop.

        For quick calls whose callers do not wait before they make the next one: ``submit`` runs one
        call between two batches, so that the queue would grow without end.
        """
        return self._made(self._call_together, function, *arguments)

    def _call_together(self, work: Work) -> None:
        self._joint.append(work)
        if len(self._joint) == 1:  # else the turn that is to come takes it along
            self._thread.call(self._run_together)

    def _run_together(self) -> None:
        while self._joint:
            self._joint.popleft()()

    def _made(
        self,
        call: Callable[[Work], None],
        function: Callable[..., ResultT],
        *arguments: object,
    ) -> Future[ResultT]:
        done: Future[ResultT] = Future()
        self._open.add(done)
        done.add_done_callback(self._open.discard)

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            outcome = result_or_error(function, *arguments)
            if isinstance(outcome, RlmeshError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        call(work)
        if self._is_closed:
            done.cancel()
        return done

    def close(self) -> None:
        """Cancel the calls that wait, and whatever is to come. Does not block."""
        self._is_closed = True
        for done in tuple(self._open):
            done.cancel()
