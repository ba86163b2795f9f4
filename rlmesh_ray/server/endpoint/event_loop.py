"""The one event loop in which a process serves gRPC.

grpc.aio polls all loops of a process through one queue, so that several loops wake each
other for nothing (grpc/grpc#25364): every endpoint of a process shares this one.
"""

import asyncio
import errno
import functools
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from rlmesh_ray.grpc_setup import require_no_fork

P = ParamSpec("P")
T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop: uvloop's, where that is installed (``rlmesh-ray[rllib]``).

    What that gains: ``python -m benchmarks serving --vs noop --vs noop-uvloop``.
    """
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="rlmesh-ray-loop", daemon=True).start()
        self._probed_s: float | None = None

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``work`` in the loop and return its result; never call this from the loop itself."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def post(self, function: Callable[[], None]) -> None:
        """Call ``function`` in the loop; does not wait for it."""
        self._loop.call_soon_threadsafe(function)

    def unresponsive_for_s(self) -> float:
        """Return for how long the loop has not reacted to an earlier call of this method.

        It does not wait: so it is 0.0 the first time, and while the loop makes progress.
        """
        probed_s = self._probed_s
        if probed_s is not None:
            return time.monotonic() - probed_s
        self._probed_s = time.monotonic()
        self.post(self._answer)
        return 0.0

    def _answer(self) -> None:
        self._probed_s = None


_START = threading.Lock()


def shared_loop() -> LoopThread:
    """Return the process's loop; the first call, from any thread, starts it.

    Raises a ConfigurationError in a process that was forked from one that had used gRPC.
    """
    require_no_fork()
    # The cache alone would start one for each thread that comes before the first has returned.
    with _START:
        return _the_loop()


@functools.cache
def _the_loop() -> LoopThread:
    return LoopThread()


def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
    """Run ``function`` in a daemon thread of its own; to be called from the loop.

    The interpreter waits for an executor's threads when it exits, and what runs here may hang
    for ever: the constructor and ``close`` of a user's environment. An OSError is raised where the
    system lets this process start no thread.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def work() -> None:
        try:
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  # raised by the future
            # Other errors would end the loop, or cannot be set on a future.
            is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome.set_exception(error if is_plain else RuntimeError(repr(error)))

    name = getattr(function, "__name__", type(function).__name__)
    thread = threading.Thread(target=work, name=f"rlmesh-ray-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise BlockingIOError(errno.EAGAIN, str(error)) from error
    return asyncio.wrap_future(outcome)
