"""What a policy is asked beside predictions: calls into its thread, each with an outcome."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from rlmesh_ray.errors import RlmeshError
from rlmesh_ray.server.batch_run import attempted
from rlmesh_ray.server.policy_thread import PolicyThread

ResultT = TypeVar("ResultT")


class PolicyCalls:
    """Calls that take turns with the policy's batches. To be used from any thread.

    Args:
        thread: The policy's.
    """

    def __init__(self, thread: PolicyThread) -> None:
        self._thread = thread
        self._open: set[Future[Any]] = set()
        self._is_closed = False

    def make(self, function: Callable[..., ResultT], *arguments: object) -> Future[ResultT]:
        """Run ``function`` in the policy's thread; it may be cancelled until it begins.

        What it raises is an RlmeshError: the policy's own, or a PolicyError for anything else.
        """
        done: Future[ResultT] = Future()
        self._open.add(done)
        done.add_done_callback(self._open.discard)

        def work() -> None:
            if not done.set_running_or_notify_cancel():
                return
            outcome = attempted(function, *arguments)
            if isinstance(outcome, RlmeshError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        self._thread.call(work)
        if self._is_closed:
            done.cancel()
        return done

    def close(self) -> None:
        """Cancel the calls that wait, and whatever is to come. Does not block."""
        self._is_closed = True
        for done in tuple(self._open):
            done.cancel()
