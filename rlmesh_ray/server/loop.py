"""The one event loop in which a process serves gRPC.

grpc.aio polls all loops of a process through one queue, so that several loops wake each
other for nothing (grpc/grpc#25364): every endpoint of a process shares this one.
"""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="rlmesh-ray-loop", daemon=True
        )
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run ``work`` in the loop and return its result; never call this from the loop itself.

        Raises:
            TimeoutError: It took longer than ``timeout_s``.
        """
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)


@functools.cache
def shared_loop() -> LoopThread:
    """Return the process's loop; the first call starts it."""
    return LoopThread()
